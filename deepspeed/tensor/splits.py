"""Which layers of a model are split, and how: by rules of the user's, by the model's own plan, or by their names.

What no rule names stays whole on every rank, which is always right: all ranks compute the same there.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn

from deepspeed.config.model.tensor_parallel import LayerRuleConfig, PartitionConfig, TensorParallelConfig
from deepspeed.errors import DeepSpeedConfigError, NotYetError
from deepspeed.zero.regions import bounds


def _names(*texts: str) -> frozenset[str]:
    return frozenset(" ".join(texts).split())


_QUERY = _names("q_proj query q wq q_lin query_proj to_q q_attn c_q")
_KEY_VALUE = _names("k_proj v_proj key value k v wk wv k_lin v_lin key_proj value_proj to_k to_v c_k c_v")
_PACKED = _names("c_attn qkv_proj qkv Wqkv W_pack in_proj attn_qkv to_qkv c_qkv")
_BY_HEADS = _names("query_key_value")  # q, k and v of one head lie together
_OUT = _names("o_proj out_proj c_proj dense wo out o out_lin to_out proj attn_out")
_UP = _names(
    "gate_proj up_proj c_fc fc1 fc_in w1 w3 up gate gate_up_proj", "wi wi_0 wi_1 lin1 linear1 fc w12 dense_h_to_4h"
)
_DOWN = _names("down_proj c_proj fc2 fc_out w2 down dense_4h_to_h wo lin2 linear2 proj")
_EMBEDDINGS = _names("embed_tokens wte word_embeddings tok_embeddings embed_in embedding token_embedding embed")
_HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "nheads", "num_attn_heads", "heads", "nhead")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "num_kv")
_HEAD_WIDTHS = ("head_dim", "head_size", "attention_head_size", "d_head")
_GROUPS = ("num_key_value_groups", "n_rep", "num_kv_groups", "num_queries_per_kv", "kv_groups")
_WIDTHS = ("embed_dim", "hidden_size", "split_size", "all_head_size", "inner_dim", "d_model", "n_embd", "q_size", "dim")
_KV_WIDTHS = ("kv_size", "kv_dim")
# What computes each feature alone, so that every rank may have some of them.
_POINTWISE = frozenset((nn.Linear, nn.Dropout, nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh))
# Attention that adds something of every head (alibi, relative positions), or packs heads in another order.
_ODD_TYPES = _names("bloom mpt t5 mt5 codegen longt5 umt5 falcon")
# Styles of transformers' plans; the others belong to experts, which stay whole, or are refused.
_STYLES: Mapping[str, tuple[str, bool]] = {
    **dict.fromkeys(("colwise", "local_colwise"), ("column", False)),
    **dict.fromkeys(("colwise_gather_output", "colwise_rep"), ("column", True)),
    **dict.fromkeys(("rowwise", "local_rowwise"), ("row", False)),
    **dict.fromkeys(("rowwise_split_input", "rowwise_rep"), ("row", True)),
    **dict.fromkeys(("packed_colwise", "local_packed_colwise"), ("packed", False)),
    "replicated_with_grad_allreduce": ("sum", False),
    "embedding_rowwise": ("vocab", False),
}
_REFUSED = frozenset(("mla_kv_a_proj", "packed_rowwise", "sequence_parallel"))


@dataclass(frozen=True)
class Split:
    """Describe how one layer is split.

    ``way``: "column" (by output), "row" (by input), "heads" (whole, one of ``heads`` outputs), "vocab" (rows of an
    embedding), "hidden" (columns of one), "sum" (whole, used on parts: gradients are summed), "whole". ``whole``: the
    outputs of a column are gathered, the input of a row is cut. ``parts``: sizes of packed weights. ``unit``: features
    that stay together. ``local``: an output head whose logits are not gathered.
    """

    way: Literal["column", "row", "heads", "vocab", "hidden", "sum", "whole"]
    whole: bool = False
    parts: tuple[int, ...] = ()
    unit: int = 1
    heads: int = 0
    local: bool = False


@dataclass
class TensorPlan:
    """Splits by module path; attributes of modules that count heads or widths, with their values on each rank."""

    splits: dict[str, Split] = field(default_factory=dict)
    numbers: list[tuple[nn.Module, str, int]] = field(default_factory=list)

    def check(self, model: nn.Module, key: str, tp_size: int) -> None:
        """Raise DeepSpeedConfigError where everything stays whole; ``key`` asks for ``tp_size`` ranks."""
        if all(split.way in ("sum", "whole") for split in self.splits.values()):
            raise DeepSpeedConfigError(
                f"{key} is {tp_size}, but no layer of {type(model).__name__} is known to be one that can be split; "
                "describe its layers in tensor_parallel.partition_config.layer_specs"
            )


def is_linear(module: nn.Module) -> bool:
    """Return whether a module multiplies by one matrix: torch's Linear, FalconLinear or transformers' Conv1D."""
    named = (isinstance(module, nn.Linear), type(module).__name__) == (True, "FalconLinear")
    plain = type(module).forward is nn.Linear.forward and "weight" in module._parameters
    return plain or named or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def _features(module: nn.Module) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a linear layer."""
    weight: Any = module.weight
    rows, columns = (getattr(weight, "tp_place", None) or weight).shape
    return (columns, rows) if isinstance(module, nn.Linear) else (rows, columns)


def _number(names: Sequence[str], *holders: Any) -> int | None:
    values = (getattr(holder, name, None) for holder in holders for name in names)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


class Planner:
    """Make the plan of a model, or stage, for ``tp_size`` ranks. ``all_names``: of all parameters, if known."""

    def __init__(
        self,
        model: nn.Module,
        wanted: TensorParallelConfig,
        tp_size: int,
        rank: int = 0,
        *,
        all_names: Iterable[str] | None = (),
        key: str = "tensor_parallel.autotp_size",
    ) -> None:
        self.model, self.wanted, self.ways, self.rank = model, wanted, tp_size, rank
        self.others, self.key = all_names, key
        self.rules = wanted.partition_config or PartitionConfig(layer_specs=())
        config = getattr(model, "config", None)
        text = getattr(config, "get_text_config", None)
        self.config = text() if text is not None else config
        self.modules = dict(model.named_modules())
        inside_mha = [path for path, m in self.modules.items() if isinstance(m, nn.MultiheadAttention)]
        self.linears = {
            path: module
            for path, module in self.modules.items()
            if is_linear(module) and path and not any(path.startswith(f"{p}.") for p in inside_mha)
        }
        # The modules right around adapters, which compute from whole values.
        self.adapted = {path.rpartition(".")[0] for path, m in self.modules.items() if hasattr(m, "base_layer")}
        self.plan = TensorPlan()

    def make(self) -> TensorPlan:
        """Make the plan; DeepSpeedConfigError for a rule that matches nothing or heads that cannot be dealt out."""
        splits = self.plan.splits
        by_user = dict(self._by_rules())
        if self.rules.use_default_specs:
            splits |= dict(self._by_own_plan()) or dict(self._by_names())
        splits |= by_user
        splits |= {path: split for path, split in self._vocabulary() if path not in by_user}
        for path in self._attentions():
            self._deal_heads(path)
        if self.rules.strict_mode and (free := [path for path in self.linears if path not in splits]):
            raise DeepSpeedConfigError(
                f"tensor_parallel.partition_config.strict_mode: no rule says how {', '.join(free[:8])} "
                f"{'are' if len(free) > 1 else 'is'} split; add patterns, or partition_type 'skip'"
            )
        return self.plan

    def _by_rules(self) -> Iterator[tuple[str, Split]]:
        kind = str(getattr(self.config, "model_type", "")).lower()
        names = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        seen: set[str] = set()
        for rule in self.rules.layer_specs:
            if rule.model_types is not None and kind not in [model_type.lower() for model_type in rule.model_types]:
                continue
            hits = [name for name in names if any(re.match(pattern, name) for pattern in rule.patterns)]
            elsewhere = self.others is None or any(re.match(p, name) for p in rule.patterns for name in self.others)
            if not hits and not elsewhere:
                raise DeepSpeedConfigError(
                    f"tensor_parallel.partition_config.layer_specs: {', '.join(map(repr, rule.patterns))} names no "
                    f"parameter of {type(self.model).__name__}; patterns are regular expressions for whole names like "
                    f"{names[0]!r}, matched from the start"
                )
            for path in dict.fromkeys(name.rpartition(".")[0] for name in hits):
                if path not in seen:
                    seen.add(path)
                    yield path, self._of_rule(path, rule)

    def _of_rule(self, path: str, rule: LayerRuleConfig) -> Split:
        if rule.partition_type == "skip":
            return Split("sum" if rule.grad_allreduce else "whole")
        if isinstance(self.modules[path], nn.Embedding):
            return Split("hidden" if rule.partition_dim in (None, 1) else "vocab")
        if path not in self.linears:
            raise DeepSpeedConfigError(
                f"tensor_parallel.partition_config.layer_specs: {path or 'the model'} is a "
                f"{type(self.modules[path]).__name__}, and only linear layers and embeddings are split"
            )
        inputs, outputs = _features(self.linears[path])
        if rule.partition_type == "row":
            return Split("row")
        return Split("column", rule.gather_output, self._parts(path, rule, outputs))

    def _parts(self, path: str, rule: LayerRuleConfig, outputs: int) -> tuple[int, ...]:
        """Return the sizes packed along the split dimension: an inner list, or a number of equal ones."""
        if rule.shape is None:
            return ()
        at: Any = rule.shape[rule.partition_dim or 0] if (rule.partition_dim or 0) < len(rule.shape) else None
        equal = (outputs // at,) * at if isinstance(at, int) and at > 0 else ()
        sizes = tuple(at) if isinstance(at, list | tuple) else equal
        if not sizes or any(not isinstance(size, int) or size < 1 for size in sizes) or sum(sizes) != outputs:
            raise DeepSpeedConfigError(
                f"tensor_parallel.partition_config.layer_specs: shape {rule.shape} does not divide the {outputs} "
                f"outputs of {path}; along partition_dim it says how many equal parts are packed, or lists their sizes"
            )
        return sizes if len(sizes) > 1 else ()

    def _by_own_plan(self) -> Iterator[tuple[str, Split]]:
        on_top = getattr(self.model, "tp_plan", None) or getattr(self.model, "_tp_plan", None) or {}
        base = getattr(self.config, "base_model_tp_plan", None) or {}
        for pattern, style in {**base, **on_top}.items():
            regex = re.compile(r"(?:.*\.)?" + re.escape(pattern).replace(r"\*", r"\d+"))
            paths = [p for p in self.modules if regex.fullmatch(p) and p.rpartition(".")[0] not in self.adapted]
            if paths and style in _REFUSED:
                raise NotYetError(f"{paths[0]}: the tensor-parallel style {style!r} is not in this release")
            for path in paths if style in _STYLES else ():
                way, whole = _STYLES[style]
                if way in ("column", "row", "packed") and path not in self.linears:
                    continue  # of experts: they stay whole
                if way == "vocab":
                    continue  # with its output head, below
                if way == "packed":
                    half = _features(self.linears[path])[1] // 2
                    yield path, Split("column", parts=(half, half))
                else:
                    yield path, Split(way, whole)  # type: ignore[arg-type]

    def _children(self, path: str) -> dict[str, str]:
        """Return the paths of the linear layers right inside, by name."""
        prefix = f"{path}." if path else ""
        return {p[len(prefix) :]: p for p in self.linears if p.startswith(prefix) and "." not in p[len(prefix) :]}

    def _attentions(self) -> list[str]:
        """Return the paths of modules with queries, or with queries, keys and values in one layer."""
        return [path for path in self.modules if (_QUERY | _PACKED | _BY_HEADS) & self._children(path).keys()]

    def _by_names(self) -> Iterator[tuple[str, Split]]:
        attentions = self._attentions()
        for path in attentions:
            yield from self._attention(path)
        for path, module in self.modules.items():
            names = self._children(path)
            if path in attentions and not {"fc1", "fc2"} <= names.keys():
                continue
            ups, downs = [names[n] for n in names if n in _UP], [names[n] for n in names if n in _DOWN]
            whole = path in self.adapted
            if not ups and not downs and len(names) == 2:
                first, second = names.values()
                pairs = _features(self.linears[first]), _features(self.linears[second])
                if pairs[0] == pairs[1][::-1] and pairs[0][1] > pairs[0][0]:
                    ups, downs = [first], [second]
                    whole = type(module) is not nn.Sequential or not {type(child) for child in module} <= _POINTWISE
            if ups and len(downs) == 1:
                yield from self._feed_forward(path, ups, downs[0], whole=whole)

    def _feed_forward(self, path: str, ups: list[str], down: str, *, whole: bool) -> Iterator[tuple[str, Split]]:
        width, sizes = _features(self.linears[down])[0], [_features(self.linears[up])[1] for up in ups]
        if any(size not in (width, 2 * width) for size in sizes):
            return
        inner = [p for p in self.modules if p.startswith(f"{path}.") and p not in (*ups, down)]
        extra = [p for p in inner if any(True for _ in self.modules[p].parameters(recurse=False))]
        # With a norm between the two the parts cannot be told from each other; in a whole block the norms are outside.
        whole = whole or (bool(extra) and not any("." in p[len(path) + 1 :] for p in extra))
        for up, size in zip(ups, sizes, strict=True):
            parts = (width, width) if size == 2 * width and not whole else ()
            yield up, Split("column", whole, parts)
        yield down, Split("row", whole)

    def _attention(self, path: str) -> Iterator[tuple[str, Split]]:
        names = self._children(path)
        outs = [names[n] for n in names if n in _OUT]
        if not outs:  # the output projection is in a module beside this one
            parent = path.rpartition(".")[0]
            outs = [p for p in (f"{parent}.output.dense",) if p in self.linears]
        ins = [names[n] for n in names if n in _QUERY | _KEY_VALUE | _PACKED | _BY_HEADS]
        if len(outs) != 1 or not ins:
            return
        whole = not self._separable(path, names)
        heads, kv, width = self._heads_of(path)
        for name in (n for n in names if names[n] in ins):
            outputs, split = _features(self.linears[names[name]])[1], Split("column", whole)
            if name in _PACKED and not whole:
                split = replace(split, parts=(outputs // 3,) * 3)
            elif name in _BY_HEADS and not whole:
                split = replace(split, unit=outputs // (heads or 1))
            yield names[name], split
        yield outs[0], Split("row", whole)

    def _separable(self, path: str, names: Mapping[str, str]) -> bool:
        """Return whether attention heads can be computed apart, by nothing but these layers and norms of a head."""
        heads, kv, width = self._heads_of(path)
        module = self.modules[path]
        # What a forward reads from the configuration is not adapted.
        counted = vars(module).keys() & {*_HEADS, *_HEAD_WIDTHS}
        if heads is None or width is None or not counted or any(True for _ in module.parameters(recurse=False)):
            return False
        if str(getattr(self.config, "model_type", "")) in _ODD_TYPES or getattr(self.config, "alibi", False):
            return False
        packed = [n for n in names if n in _PACKED | _BY_HEADS]
        if any(_features(self.linears[names[n]])[1] != 3 * heads * width or kv != heads for n in packed):
            return False
        used = [names[n] for n in names if n in _QUERY | _KEY_VALUE | _PACKED | _BY_HEADS | _OUT]
        inner = [p for p in self.modules if p.startswith(f"{path}.") and p not in used]
        sizes = {p: [w.numel() for w in self.modules[p].parameters(recurse=False)] for p in inner}
        if any(p in self.linears or any(size != width for size in sizes[p]) for p in inner):
            return False
        self.plan.splits |= {p: Split("sum") for p in inner if sizes[p]}
        return True

    def _heads_of(self, path: str) -> tuple[int | None, int | None, int | None]:
        """Return the number of heads, of key and value heads, and of features per head."""
        module, names = self.modules[path], self._children(path)
        holders = (module, getattr(module, "config", None), self.config)
        heads, width = _number(_HEADS, *holders), _number(_HEAD_WIDTHS, *holders)
        query = next((names[n] for n in names if n in _QUERY), None)
        if heads is None and width and query is not None:
            heads = _features(self.linears[query])[1] // width
        kv = _number(_KV_HEADS, *holders) or heads
        if heads and query is not None:
            width = _features(self.linears[query])[1] // heads
            keys = next((names[n] for n in names if n in _KEY_VALUE), None)
            kv = _features(self.linears[keys])[1] // width if keys is not None else kv
        elif heads and width is None:
            packed = next((names[n] for n in names if n in _PACKED | _BY_HEADS), None)
            width = _features(self.linears[packed])[1] // (3 * heads) if packed is not None else None
        return heads, kv, width

    def _deal_heads(self, path: str) -> None:
        """Cut between heads; copy heads of keys and values if ranks outnumber them; adapt what counts heads."""
        splits, names = self.plan.splits, self._children(path)
        ours = [n for n in names if n in _QUERY | _PACKED | _BY_HEADS]
        cut = any(names[n] in splits and splits[names[n]].way == "column" and not splits[names[n]].whole for n in ours)
        heads, kv, width = self._heads_of(path)
        if heads is None or width is None or not cut:
            return
        kv = kv or heads
        copied = kv < self.ways  # each rank computes all heads of keys and values, and goes on with one
        packed = any(names[n] in splits and splits[names[n]].parts for n in ours)
        unfit = heads % self.ways or self.ways % kv if copied and kv > 1 else packed and kv < heads and kv % self.ways
        if heads < self.ways or heads % kv or unfit:
            raise DeepSpeedConfigError(
                f"{self.key} {self.ways} does not fit the attention of {path}, whose heads are {heads} ({kv} of keys "
                f"and values); use a divisor of {kv}"
            )
        group = 1 if copied else heads // kv  # queries that stay beside their head of keys
        edges = bounds(heads // group, self.ways)
        for name in names:
            split = splits.get(names[name])
            if split is None or split.way not in ("column", "row") or split.whole:
                continue
            if name in _KEY_VALUE and copied:
                splits[names[name]] = Split("heads", heads=kv)
            elif split.unit == 1:
                splits[names[name]] = replace(split, unit=width if name in _KEY_VALUE | _PACKED else group * width)
        local = group * (edges[self.rank + 1] - edges[self.rank])
        local_kv = 1 if copied else local // group
        self._adapt(path, _HEADS, heads, local)
        self._adapt(path, _KV_HEADS, kv, local_kv)
        self._adapt(path, _GROUPS, heads // kv, local // local_kv)
        self._adapt(path, _WIDTHS, heads * width, local * width)
        self._adapt(path, _KV_WIDTHS, kv * width, local_kv * width)

    def _adapt(self, path: str, names: Iterable[str], value: int, local: int) -> None:
        module = self.modules[path]
        self.plan.numbers += [(module, n, local) for n in names if module.__dict__.get(n) == value and local != value]

    def _vocabulary(self) -> Iterator[tuple[str, Split]]:
        """Yield the splits of embedding and output head, where the model has both as modules of torch's."""
        heads = [path for path in self.linears if path.rpartition(".")[2] in self.rules.lm_head_patterns]
        get = getattr(self.model, "get_output_embeddings", None)
        named = get() if callable(get) else None
        heads = [path for path in self.linears if self.modules[path] is named] or heads
        if not heads:
            if self.wanted.vocab_parallel_lm_head:
                raise DeepSpeedConfigError(
                    "tensor_parallel.vocab_parallel_lm_head is true, but the model has no linear layer named "
                    f"{' or '.join(self.rules.lm_head_patterns)}"
                )
            return
        words = _features(self.linears[heads[0]])[1]
        tables = [(path, m) for path, m in self.modules.items() if type(m).forward is nn.Embedding.forward]
        inside = [path for path, m in tables if m.num_embeddings == words and m.weight is not None]  # on this stage
        rows = [path for path in inside if path.rpartition(".")[2] in _EMBEDDINGS] or inside[:1]
        tied = [path for path in inside if self.modules[path].weight is self.modules[heads[0]].weight]
        chosen: Any = [self.modules[path] for path in rows]
        plain = not any(m.max_norm is not None or m.scale_grad_by_freq or m.sparse for m in chosen)
        alone = bool(tied and getattr(self.model, "tied_homes", dict)()) or any(  # the first stage knows no head
            m.weight is self.modules[heads[0]].weight
            for path, m in self.modules.items()
            if isinstance(getattr(m, "weight", None), nn.Parameter) and path not in (*heads, *tied)
        )
        if self.wanted.vocab_parallel_lm_head is False or words < self.ways or alone or not plain:
            yield from ((path, Split("whole")) for path in (*heads, *rows))
            return
        local = bool(self.wanted.vocab_parallel_lm_head)
        yield from ((path, Split("column", whole=not local, local=local)) for path in heads)
        yield from ((path, Split("vocab")) for path in rows)
