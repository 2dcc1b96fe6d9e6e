"""A model as a list of layers, of which each rank builds those of its pipeline stage only."""

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch import nn

from deepspeed.accelerator.device import get_accelerator, map_tensors
from deepspeed.client.activation import non_reentrant_checkpoint
from deepspeed.client.attrs import answers, recursive_getattr
from deepspeed.client.zero.init import restore_init_context, shutdown_init_context
from deepspeed.comm.collectives import AxisGroup, broadcast, gather_objects
from deepspeed.comm.mesh.groups import Mesh, plain_mesh, with_group
from deepspeed.comm.point_to_point import receive_object, send_object
from deepspeed.errors import NotYetError, PipelineError, UsageError
from deepspeed.monitor.log import log_dist
from deepspeed.pipe.orders import Micro, homes_of
from deepspeed.pipe.partition import boundaries_of
from deepspeed.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid, ProcessTopology
from deepspeed.sequence.batch import mean_of_parts
from deepspeed.zero.hooks import tensors_in
from deepspeed.zero.param import is_composed, local_of, point
from deepspeed.zero.partition import UnitFacts


class LayerSpec:
    """Describe a layer that is built where it is needed: ``typename(*args, **kwargs)``."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not isinstance(typename, type) or not issubclass(typename, nn.Module):
            raise UsageError(f"a LayerSpec takes a subclass of torch.nn.Module, not {typename!r}")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.typename.__name__})"

    def build(self, log: bool = False) -> nn.Module:
        """Build a new layer; ``log`` writes that to the log."""
        if log:
            log_dist(f"building {self!r}", [-1])
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """Describe a layer that shares its parameters with all layers of the same ``key``, on whatever stages these are.

    ``forward_fn(module, value)`` replaces the call. ``tied_weight_attr``: (dotted) attributes that must exist.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


class PipelineModule(nn.Module):
    """Model of ``layers`` (modules, LayerSpecs, plain callables, or an nn.Sequential), cut into ``num_stages`` stages.

    Each layer takes what the one before returns: a tensor, or a tuple of tensors and None, as one argument. Parameters
    are named by the layer's position in the whole list (``3.weight``), tied ones ``tied_modules.KEY.weight``, so that
    checkpoints do not depend on the cut. ``loss_fn(output, labels)`` runs behind the last layer; without it the last
    layer returns the loss. ``partition_method``: "parameters", "uniform", "type:REGEX", "profile" (measured time of
    ``sample_input`` through each layer, on the first rank), or a weight per layer. ``activation_checkpoint_interval``
    n > 0 recomputes blocks of n layers in the backward, only those whose classes are in ``checkpointable_layers`` where
    that is given. ``dynamic_shape``: activations may differ in shape though inputs do not. ``chunks_per_stage`` and
    ``chunk_style`` ("loop" or "v"): what a schedule of the configuration needs; ``initialize`` cuts anew where it needs
    something else. Raise UsageError where the ranks or layers do not divide.
    """

    repeats_blocks = True  # for ZeRO: layers of one class are blocks, as in an nn.Sequential

    def __init__(
        self,
        layers: Sequence[Any] | nn.Sequential,
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str | Sequence[float] = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = non_reentrant_checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        chunks_per_stage: int = 1,
        chunk_style: str = "loop",
        sample_input: Any = None,
    ) -> None:
        super().__init__()
        self._specs, self.loss_fn = list(layers), loss_fn
        self._seeding = (seed_fn or torch.manual_seed, base_seed) if seed_layers else None
        self.seed_layers = seed_layers
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func, self.checkpointable_layers = activation_checkpoint_func, checkpointable_layers
        self.dynamic_shape, self._sample = dynamic_shape, sample_input
        mesh = plain_mesh("gloo")
        self._world, self.global_rank = mesh.job, mesh.job.index
        self._topo = _topology(topology, num_stages, mesh.job.size)
        self.num_stages = self._topo.get_dim("pipe")
        self._grid = PipelineParallelGrid(self._topo)
        self.rank_of_pipe = self._grid.get_stage_id()
        self._check_specs()
        self._method = partition_method
        self._weights = self._measure() if partition_method == "profile" else None
        self._counts: list[int] | None = None
        self.tied_modules = nn.ModuleDict()
        self.schedule = "1f1b"  # of the configuration; set by ``initialize``
        self.falling: AxisGroup | None = None  # for messages to a lower stage, where the two directions need two groups
        self.sharers: AxisGroup | None = None  # of each sequence, where every rank reads its part of the tokens
        self._on_stages: list[tuple[nn.Parameter, Any]] = []
        self._now = 0
        self._as_built: dict[str, tuple[int, str]] = {}
        self.boundaries: list[int] = []
        self.homes: tuple[int, ...] = ()
        self.recut(chunks_per_stage, chunk_style)

    def recut(self, chunks_per_stage: int, chunk_style: str, *, method: str | None = None, seeds: bool = False) -> None:
        """Deal the layers out anew by ``method``, and build this rank's; built ones keep values, but with ``seeds``."""
        parts = self.num_stages * chunks_per_stage
        if seeds:
            if any(gather_objects(_samples(self) != self._as_built, self._world)):
                raise UsageError(
                    "pipeline.seed_layers builds the layers again, but weights were set since PipelineModule has built "
                    "them: pass seed_layers=True to PipelineModule, or set the weights behind initialize"
                )
            self._seeding, self.seed_layers = (torch.manual_seed, 1234), True
        holders = {} if seeds else self._holders()
        self._built = {name: m for name, m in self.named_modules(remove_duplicate=False) if name in holders}
        if method is not None:
            self._method, self._weights, self._counts = method, None, None
            self._weights = self._measure() if method == "profile" else None
        if self._counts is None and self._method in ("parameters", "best"):
            self._counts = [_trained(spec) for spec in self._specs]
        names = [_class_name(spec) for spec in self._specs]
        by, numels = self._weights or self._method, self._counts or [0] * len(names)
        self.boundaries = boundaries_of(by, parts, names=names, numels=numels)
        self.chunks_per_stage, self.chunk_style = chunks_per_stage, chunk_style
        self.homes = homes_of(self.num_stages, chunks_per_stage, style=chunk_style)
        for name in [str(i) for i in range(len(self._specs))]:
            self._modules.pop(name, None)
        self.tied_modules.clear()
        self._calls: dict[int, Callable[[Any], Any]] = {}
        self._check_sharing()
        self._build()
        none = "has no parameters; use fewer stages or another partition_method"
        fault = None if any(True for _ in self.parameters()) else none
        fault = fault if self._world.alike else self._carry(holders) or fault
        self._built, self._as_built = {}, _samples(self)
        for rank, why in enumerate(gather_objects(fault, self._world)):
            if why is not None:
                raise UsageError(f"{self.title(rank)} {why}")

    def _build(self) -> None:
        suspended = shutdown_init_context()  # its broadcasts want the same layers on all ranks
        try:
            # In the order of the whole list, so that tied parameters come in one order on all stages.
            keys = dict.fromkeys(s.key for s in self._specs if isinstance(s, TiedLayerSpec))
            local = [i for i, rank in self._layer_homes() if rank == self.rank_of_pipe]
            for index in local:
                self._calls[index] = self._build_one(index)
            for key in [k for k in keys if k in self.tied_modules]:
                self.tied_modules[key] = self.tied_modules.pop(key)
        finally:
            restore_init_context(suspended)

    def _build_one(self, index: int) -> Callable[[Any], Any]:
        spec = self._specs[index]
        if self._seeding is not None:
            seed_fn, base = self._seeding
            seed_fn(base + index)
        if isinstance(spec, TiedLayerSpec):
            if spec.key not in self.tied_modules:
                self.tied_modules[spec.key] = self._built_or_new(f"tied_modules.{spec.key}", spec)
                for path in spec.tied_weight_attr:
                    recursive_getattr(self.tied_modules[spec.key], path)
            layer: Any = self.tied_modules[spec.key]
            return partial(spec.forward_fn, layer) if spec.forward_fn is not None else layer
        layer = self._built_or_new(str(index), spec) if isinstance(spec, LayerSpec) else spec
        if isinstance(layer, nn.Module):
            self.add_module(str(index), layer)
        call: Callable[[Any], Any] = layer
        return call

    def _built_or_new(self, name: str, spec: LayerSpec) -> nn.Module:
        return self._built[name] if name in self._built else spec.build()

    def _carry(self, holders: dict[str, tuple[int, ...]]) -> str | None:
        """Send layers that move to another rank their values on the first of ``holders``; return a fault if any."""
        fault = None
        for name, ranks in self._holders().items():
            source = holders.get(name, ranks)[0]
            for rank in [rank for rank in ranks if rank not in holders.get(name, ranks)]:
                if source == self.rank_of_pipe:
                    values = [(n, part.clone().cpu(), t.requires_grad) for n, t, part in _values(self._built[name])]
                    send_object(values, self._grid.stage_to_global(rank), self._world).wait()
                elif rank == self.rank_of_pipe:
                    values = receive_object(self._grid.stage_to_global(source), self._world)
                    local = {n: t for n, t, _ in _values(self.get_submodule(name))}
                    if {n: v.shape for n, v, _ in values} != {n: local_of(t).shape for n, t in local.items()}:
                        fault = (
                            f"builds {name!r} with other parameters or buffers than it has on pipeline stage {source}, "
                            "from where the configuration takes it: change its structure behind initialize, or pass "
                            "chunks_per_stage=, chunk_style= and partition_method= to PipelineModule"
                        )
                        continue
                    for n, value, trained in values:
                        point(local[n], value.to(local[n].device))  # also of another dtype
                        local[n].requires_grad_(trained)
        return fault

    def _layer_homes(self) -> Iterator[tuple[int, int]]:
        for chunk, rank in enumerate(self.homes):
            yield from ((i, rank) for i in range(self.boundaries[chunk], self.boundaries[chunk + 1]))

    def _check_specs(self) -> None:
        for index, spec in enumerate(self._specs):
            if not (isinstance(spec, (LayerSpec, nn.Module)) or callable(spec)):
                raise UsageError(f"layer {index} is a {type(spec).__name__}, neither module, LayerSpec nor callable")
        kinds: dict[str, TiedLayerSpec] = {}
        for spec in (s for s in self._specs if isinstance(s, TiedLayerSpec)):
            first = kinds.setdefault(spec.key, spec)
            if first.typename is not spec.typename:
                raise UsageError(
                    f"the tied layers {spec.key!r} are of two classes, {first.typename.__name__} and "
                    f"{spec.typename.__name__}; use one class, with a forward_fn where it is called in another way"
                )

    def _check_sharing(self) -> None:
        """Raise UsageError for an untied parameter in layers of several ranks: each would train its own copy."""
        homes: dict[nn.Parameter, tuple[int, int]] = {}
        for index, rank in self._layer_homes():
            layer = self._specs[index]
            for param in layer.parameters() if isinstance(layer, nn.Module) else ():
                other, first = homes.setdefault(param, (rank, index))
                if other != rank:
                    raise UsageError(
                        f"layers {first} and {index} share a parameter and are on pipeline stages {other} and {rank}; "
                        "write both as TiedLayerSpec with one key"
                    )

    def _measure(self) -> list[float]:
        """Measure the seconds of each layer's forward and backward on the first rank, for all ranks."""
        if self._sample is None:
            raise UsageError("partition_method 'profile' needs sample_input, an input of the first layer")
        times = measure_layers(self._specs, self._sample) if self.global_rank == 0 else None
        return list(gather_objects(times, self._world)[0])

    def forward(self, value: Any, chunk: int = 0) -> Any:
        """Run ``value`` through the layers of ``chunk``, which is on this rank."""
        start, stop = self.boundaries[chunk], self.boundaries[chunk + 1]
        step = self.activation_checkpoint_interval if torch.is_grad_enabled() else 0
        for index in range(start, stop, step or stop - start):
            block = range(index, min(stop, index + (step or stop - start)))
            if step and self._recomputed(block):
                # Several arguments rather than a tuple: torch looks for tensors among them.
                many = isinstance(value, tuple)
                run = partial(self._through, block, many=many)
                value = self.activation_checkpoint_func(run, *(value if many else (value,)))
            else:
                value = self._through(block, value)
        return value

    def _through(self, block: range, *values: Any, many: bool = False) -> Any:
        value = values if many else values[0]
        for self._now in block:
            value = self._calls[self._now](value)
        return value

    def _recomputed(self, block: range) -> bool:
        layers = [self._calls[i] for i in block]
        if self.checkpointable_layers is not None:
            return all(type(layer).__name__ in self.checkpointable_layers for layer in layers)
        return any(isinstance(layer, (nn.Module, partial)) for layer in layers)

    def place(self, chunk: int, *, backward: bool) -> str:
        """Return the place of an error for people: the layer that runs; in a backward, the layers of the chunk."""
        if backward:
            return f"layers {self.boundaries[chunk]}-{self.boundaries[chunk + 1] - 1}"
        return f"layer {self._now} ({_class_name(self._specs[self._now])})"

    def run_chunk(self, chunk: int, value: Any, batch: Any) -> Any:
        """Run one chunk on one micro-batch, for the engine; the hooks of ZeRO see this module's call."""
        return self(value, chunk)

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        """Return the scalar loss of the last layer's output. Raise UsageError if it is no scalar.

        Where sequence-parallel ranks read parts, ``loss_fn`` returns the mean of this rank's tokens, or a pair of it
        and their number (default: labels other than -100), and the loss is the mean of all tokens. Collective then.
        """
        loss, labels = self.loss_fn(output, batch.labels) if self.loss_fn is not None else output, batch.labels
        if self.sharers is not None and isinstance(loss, tuple) and len(loss) == 2:
            loss, labels = loss
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            kind = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            who = "loss_fn" if self.loss_fn is not None else "the last layer, as there is no loss_fn,"
            raise UsageError(f"{who} has to return a scalar tensor, got {kind}")
        return loss.reshape(()) if self.sharers is None else mean_of_parts(loss.reshape(()), labels, self.sharers)

    def params_of(self, chunk: int) -> list[nn.Parameter]:
        """Return the parameters, trained or not, that the layers of ``chunk`` use, or the loss."""
        layers = (self._calls[i] for i in range(self.boundaries[chunk], self.boundaries[chunk + 1]))
        owners = [self.loss_fn, *(layer.args[0] if isinstance(layer, partial) else layer for layer in layers)]
        return list(dict.fromkeys(p for m in owners if isinstance(m, nn.Module) for p in m.parameters()))

    @property
    def readers(self) -> tuple[int, ...]:
        """Return the pipeline ranks that need batches: for the inputs, for the labels."""
        return tuple(dict.fromkeys((self.homes[0], self.homes[-1])))

    def micro_batch(self, item: Any) -> Micro:
        """Return the inputs and labels of an item of the data iterator. Raise UsageError if it is no pair."""
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            kind = f"{len(item)} items" if isinstance(item, (tuple, list)) else f"a {type(item).__name__}"
            raise UsageError(
                f"the data iterator has to yield (inputs, labels), got {kind}; engine.set_batch_fn converts"
            )
        return Micro(*item)

    def _holders(self) -> dict[str, tuple[int, ...]]:
        """Return, by name of each module, the pipeline ranks that hold it."""
        holders: dict[str, set[int]] = {}
        for index, rank in self._layer_homes():
            spec = self._specs[index]
            if isinstance(spec, (LayerSpec, nn.Module)):
                name = f"tied_modules.{spec.key}" if isinstance(spec, TiedLayerSpec) else str(index)
                holders.setdefault(name, set()).add(rank)
        return {name: tuple(sorted(ranks)) for name, ranks in holders.items()}

    def tied_homes(self) -> dict[str, tuple[int, ...]]:
        """Return prefix of parameter names, up to a dot -> pipeline ranks, for what several ranks hold."""
        holders = self._holders()
        if isinstance(self.loss_fn, nn.Module) and [*self.loss_fn.parameters()]:
            holders["loss_fn"] = tuple(range(self.num_stages))  # all have it, the last stage calls it
        return {f"{name}.": ranks for name, ranks in holders.items() if len(ranks) > 1}

    def describe(self, rank: int) -> str:
        """Name the layers of a pipeline rank, for people."""
        chunks = [c for c, holder in enumerate(self.homes) if holder == rank]
        return "layers " + ", ".join(f"{self.boundaries[c]}-{self.boundaries[c + 1] - 1}" for c in chunks)

    def title(self, rank: int) -> str:
        """Name a rank of the job, for people."""
        stage = self._topo.get_coord(rank).pipe
        return f"rank {rank} (pipeline stage {stage}, {self.describe(stage)})"

    num_pipeline_stages = answers("num_stages")
    partitions = answers(lambda self: list(self.boundaries), "Positions at which the list of layers is cut.")
    topology = answers("_topo", "The grid of all ranks.")
    mpu = answers("_grid", "What Megatron-style code asks about the place of this rank.")

    def stage_owner(self, layer_idx: int) -> int:
        """Return the pipeline stage that holds a layer."""
        return dict(self._layer_homes())[layer_idx]

    def set_checkpoint_interval(self, interval: int) -> None:
        """Recompute blocks of ``interval`` layers; 0: none."""
        self.activation_checkpoint_interval = interval

    def get_additional_losses(self) -> None:
        """Return further losses to report: None, unless a subclass has some."""

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """Return parameters that this stage shares with others, and their process groups; after ``initialize``."""
        return list(self._on_stages)

    def allreduce_tied_weight_gradients(self) -> NoReturn:
        """Raise PipelineError: the engine sums these gradients, and a second sum would be wrong."""
        raise PipelineError("the engine sums the gradients of tied layers over their stages; delete this call")

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> NoReturn:
        """Raise PipelineError: checkpoints have no file for each layer."""
        raise PipelineError(
            f"layer {local_layer_idx}: checkpoints have no file for each layer; engine.save_checkpoint and "
            f"load_checkpoint write and read all of {ckpt_dir}, at any number of stages, and ds_checkpoint export "
            "writes weights alone"
        )

    def join(self, mesh: Mesh, facts: UnitFacts) -> tuple[Mesh, Callable[[str, nn.Parameter], UnitFacts]]:
        """Make the process groups of tied layers, and broadcast their parameters so that all stages have equal values.

        Return the mesh with these groups, and a function of the facts of a parameter. Collective over the stages.
        """
        if mesh.pp.backend not in ("gloo", "none"):  # messages of both directions would wait for each other
            mesh, self.falling = with_group(mesh, "falling", mesh.pp.ranks)
        tied: dict[str, UnitFacts] = {}
        groups = {tuple(range(self.num_stages)): mesh.pp}
        for prefix, ranks in self.tied_homes().items():
            if self.rank_of_pipe not in ranks:
                continue
            if ranks not in groups:
                mesh, groups[ranks] = with_group(mesh, f"tied{ranks}", tuple(mesh.pp.ranks[r] for r in ranks))
            wide = replace(mesh, groups=(*mesh.groups, groups[ranks]))
            for name, param in self.named_parameters():
                if f"{name}.".startswith(prefix):
                    values = local_of(param).detach().to(get_accelerator().torch_device()).contiguous()
                    broadcast(values, groups[ranks])
                    local_of(param).detach().copy_(values)
                    tied[name] = replace(facts, mesh=wide, tie=name)
                    self._on_stages.append((param, groups[ranks].pg))
        self._grid = PipelineParallelGrid(self._topo, mesh=mesh)
        plain = replace(facts, mesh=mesh)
        return mesh, lambda name, _: tied.get(name, plain)


class DualPipeVModule(PipelineModule):
    """PipelineModule cut for the schedules "dualpipev" (its default) and "zbv": stage r holds parts r and 2N-1-r."""

    __signature__ = inspect.signature(PipelineModule)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, chunks_per_stage=2, chunk_style="v")


def _values(layer: nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield name, tensor and this rank's part of parameters and buffers with values here; composed tensors left out."""
    for name, tensor in itertools.chain(layer.named_parameters(), layer.named_buffers()):
        if not (tensor.is_meta or is_composed(tensor) or hasattr(tensor, "_ds_unit")):
            yield name, tensor, local_of(tensor).detach()


def _samples(layer: nn.Module) -> dict[str, tuple[int, str]]:
    """Return each tensor's version and some elements, to detect writes; those through ``.data`` change no version."""
    return {n: (t._version, repr(v.flatten()[:: v.numel() // 64 + 1].tolist())) for n, t, v in _values(layer)}


def measure_layers(layers: Sequence[Any], sample: Any, *, repeats: int = 3) -> list[float]:
    """Measure the seconds of a forward and a backward of each layer, the best of ``repeats``; built one by one."""
    times, value, built = [], sample, dict[str, nn.Module]()
    for spec in layers:
        layer = spec
        if isinstance(spec, TiedLayerSpec):
            module = built.setdefault(spec.key, spec.build()) if spec.key not in built else built[spec.key]
            layer = partial(spec.forward_fn, module) if spec.forward_fn is not None else module
        elif isinstance(spec, LayerSpec):
            layer = spec.build()
        seconds = []
        for _ in range(repeats):
            get_accelerator().synchronize()
            start = perf_counter()
            out = layer(value)
            if roots := [t for t in tensors_in(out) if t.requires_grad]:
                torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
            get_accelerator().synchronize()
            seconds.append(perf_counter() - start)
        for param in layer.parameters() if isinstance(layer, nn.Module) else ():
            param.grad = None
        times.append(min(seconds))
        value = map_tensors(out, torch.Tensor.detach)
    return times


def _class_name(spec: Any) -> str:
    if isinstance(spec, LayerSpec):
        return spec.typename.__name__
    name = type(spec).__name__ if isinstance(spec, nn.Module) else getattr(spec, "__name__", "callable")
    return re.sub(r"\W", "", name)


def _trained(spec: Any) -> int:
    """Count trained parameters; a spec is built on the meta device for that, if its constructor allows it."""
    if not isinstance(spec, LayerSpec):
        params = list(spec.parameters()) if isinstance(spec, nn.Module) else []
        return sum(p.numel() for p in params if p.requires_grad)
    suspended = shutdown_init_context()
    try:
        with torch.device("meta"):
            layer = spec.build()
    except (RuntimeError, NotImplementedError, TypeError):
        state = torch.get_rng_state()
        layer = spec.build()
        torch.set_rng_state(state)
    finally:
        restore_init_context(suspended)
    return sum(p.numel() for p in layer.parameters() if p.requires_grad)


def _topology(topology: ProcessTopology | None, num_stages: int | None, world: int) -> ProcessTopology:
    if topology is None:
        if num_stages is None:
            raise UsageError("PipelineModule needs num_stages or topology")
        if num_stages < 1 or world % num_stages:
            raise UsageError(f"{world} ranks cannot be divided into {num_stages} pipeline stages; use a divisor")
        return PipeDataParallelTopology(num_stages, world // num_stages)
    if num_stages is not None and topology.get_dim("pipe") != num_stages:
        raise UsageError(
            f"num_stages is {num_stages}, but the topology has {topology.get_dim('pipe')} on its axis 'pipe'"
        )
    if topology.world_size() != world:
        raise UsageError(f"the topology is of {topology.world_size()} ranks, and there are {world}")
    ordered = [axis for axis in ("pipe", "data", "model") if axis in topology.axes]
    if ordered != topology.axes or "pipe" not in ordered:
        raise NotYetError(
            f"a topology with the axes {topology.axes}; they have to be pipe, data and model, in that order"
        )
    return topology
