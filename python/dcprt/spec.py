"""What a checkpoint is, once its config.json is read. Lengths in tokens, sizes in elements."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of a checkpoint. `kind` is default, linear, dynamic, llama3 or yarn."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, 2024). The cache holds `kv_lora_rank + rope_dim` elements a token.

    A head has `nope_dim + rope_dim` dimensions for scores and `v_dim` for values; `q_lora_rank` 0 means that queries
    are projected at once. `softmax_scale` includes what YaRN adds.
    """

    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    softmax_scale: float


@dataclass(frozen=True)
class MoESpec:
    """Routed experts. `scoring` is softmax or sigmoid; the chosen weights are summed to one if `normalize`.

    Groups limit the choice to the `top_groups` best of `groups`; `bias_corrected` adds a learned bias to choose by,
    but not to weigh by. The first `dense_layers` layers and those in `other_dense_layers` have a plain MLP instead.
    `shared_width` is that of the MLP that every token passes beside its experts, 0 for none.
    """

    num_experts: int
    experts_per_token: int
    expert_width: int
    shared_width: int = 0
    dense_layers: int = 0
    scoring: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    bias_corrected: bool = False
    other_dense_layers: tuple[int, ...] = ()

    def routed(self, layer: int) -> bool:
        """Whether this layer has experts."""
        return layer >= self.dense_layers and layer not in self.other_dense_layers


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a checkpoint, as its config.json tells it; lengths in tokens, sizes in elements.

    With `mla`, `num_kv_heads` is 1 and `head_dim` is what one token takes in the cache. `rope_interleaved` says that
    the rotated dimensions are paired (0, 1), (2, 3), ... instead of half by half. `fp8_block` is the block of an
    e4m3 weight that shares one scale, () where weights are not quantized. `mtp_layers` behind the last layer predict
    further tokens; they are not loaded.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_eps: float = 1e-5
    rope: RopeSpec = RopeSpec()
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    partial_rotary: float = 1.0
    qk_norm: bool = False
    mla: MLASpec | None = None
    moe: MoESpec | None = None
    rope_interleaved: bool = False
    fp8_block: tuple[int, ...] = ()
    mtp_layers: int = 0

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.mla.rope_dim if self.mla else int(self.head_dim * self.partial_rotary)

    @property
    def key_dim(self) -> int:
        """Elements of a cached key of one KV head; MLA's latent counts as one."""
        return self.mla.kv_lora_rank + self.mla.rope_dim if self.mla else self.head_dim

    @property
    def value_dim(self) -> int:
        """Elements of a cached value; MLA's are the first of its key."""
        return self.mla.kv_lora_rank if self.mla else self.head_dim

    @property
    def cached_heads(self) -> int:
        """KV heads as the cache sees them: one latent under MLA."""
        return 1 if self.mla else self.num_kv_heads

    @property
    def query_head_elements(self) -> int:
        """Weights of one query head in one layer; under MLA with the up-projections it absorbs."""
        if self.mla is None:
            return self.head_dim * self.hidden_size
        query = (self.mla.nope_dim + self.mla.rope_dim) * (self.mla.q_lora_rank or self.hidden_size)
        return query + (self.mla.nope_dim + self.mla.v_dim) * self.mla.kv_lora_rank

    @property
    def out_head_elements(self) -> int:
        """Weights of one head in the output projection of one layer."""
        return (self.mla.v_dim if self.mla else self.head_dim) * self.hidden_size

    @property
    def kv_elements_per_head(self) -> int:
        """Cached elements of one token, KV head and layer."""
        return self.key_dim + (0 if self.mla else self.value_dim)
