"""Adapters (LoRA and its relatives) computed beside a model's layers, without merging them into the weights.

    layers      what of a model adapters may change, and how each is computed
    strengths   the multipliers: one small vector a device, updated in place
    pieces      an adapter's tensors for one layer, as read from a file
    stacks      all active adapters of one layer put together
    terms       deltas that are no product of two factors: full, Kronecker, Hadamard, rotations
    dora        magnitudes: norms of the changed weight, computed once a change of multipliers
    linear, convolution, embedding, swapped   the forwards of adapted layers
    placing     the forwards put on a model's layers and taken off again
    streaming   tensors that travel with their block
    state       what one model has loaded

The names that users call are in `weightstream.offload`.
"""
