"""Reference CPU platform: real hybrid (KDA + MLA) forward passes in plain torch.

Out-of-tree platform plugin for machines without any accelerator. ``detection``
decides whether it is active, ``platform`` holds the ``SRTPlatform`` subclass,
``hooks`` lists which upstream kernels are replaced and by what. The replacements
(``kda``, ``causal_conv``, ``gated_norm``, ``state_tracking``, ``attention``) import
torch only, so that they can be tested without SGLang.
"""
