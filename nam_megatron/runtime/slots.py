"""Fields of a layer's spec that are meant to be empty, for `empty` of a kind's layer.py. Any other empty field is refused (stack.py)."""

NO_CROSS = frozenset({"pre_cross_attn_layernorm", "cross_attention", "cross_attn_bda"})
NO_MLP = frozenset({"pre_mlp_layernorm", "mlp", "mlp_bda"})
NO_ATTENTION = frozenset({"input_layernorm", "self_attention", "self_attn_bda"})
