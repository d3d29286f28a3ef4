"""The gated delta rule: constant states by slot, and the mixers over them."""
