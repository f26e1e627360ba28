"""One real SGLang scheduler on virtual time, over a null model.

The scheduler, its radix cache, allocators, batch builder, policies and retraction are
the ones a server runs. Only four things are replaced: the model's forward pass
(:mod:`.null_model`, :mod:`.engine`), the device (:mod:`.platform`), the memory that
is left for the pools (:mod:`.pools`) and the clock (:mod:`.cost`). The front end is
``python -m sglang.virtual_worker``; :mod:`.protocol` is what it speaks.
"""
