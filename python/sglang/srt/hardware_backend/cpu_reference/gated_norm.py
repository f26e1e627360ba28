"""RMS norm with an output gate, in plain torch."""

import torch
import torch.nn.functional as F

_ACTIVATIONS = {"swish": F.silu, "silu": F.silu, "sigmoid": torch.sigmoid}


def rms_norm_gated(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str = "swish",
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor:
    """``x`` [..., D] normalised by its root mean square, times weight and gate.

    ``g`` has the elements of ``x``. A fused residual is not offered here.
    """
    del residual_in_fp32
    if residual is not None or prenorm:
        raise NotImplementedError("rms_norm_gated: no fused residual on this platform")
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    return (y * _ACTIVATIONS[activation](g.float().reshape(x.shape))).to(x.dtype)
