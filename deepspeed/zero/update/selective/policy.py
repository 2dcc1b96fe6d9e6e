"""ZenFlow (Lan et al. 2025, arXiv 2505.12242): the columns with the largest gradients are updated on the device at each
step, the rest by the host every so many steps, with the mean of their gradients.

A chosen column's masters and moments are on the device, in compact tensors; their places on the host are stale, and
what the host's update, which goes over everything, makes of them does not matter. Whoever looks at a state brings all
of them home, beside the sums of the open window and what is chosen, as further slots of the optimizer's state: a
checkpoint has them as it has the moments. The next step takes all of it from there, so all that is known is saved.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn

from deepspeed.comm import collectives
from deepspeed.optim.rules import AdamBase, FusedAdam
from deepspeed.tier.store import TierStore
from deepspeed.tier.transfer import ARRIVED, Several, Transfer
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.param import requiring
from deepspeed.zero.plan import StateKind
from deepspeed.zero.unit import Unit
from deepspeed.zero.update.apply import Groups, captured_groups, frozen_since, step_over
from deepspeed.zero.update.late import Begun, LateUpdate
from deepspeed.zero.update.policy import Step, UpdateHost
from deepspeed.zero.update.publish import Publication
from deepspeed.zero.update.selective.columns import Chosen, WindowSum, bands_of, chosen_of, shapes_of, widths_of
from deepspeed.zero.update.selective.settings import ColumnsPlan

SLOT = "zenflow_"  # what the names of the further slots begin with
SUM, CHOSEN = f"{SLOT}sum", f"{SLOT}chosen"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_WINDOWS = (4, 16)  # the shortest and the longest window of "auto"; columns are chosen again every so many, too
_PIECE = 1 << 20  # elements whose sums fit a cache


@dataclass
class Counts:
    """Counts, equal on all ranks. ``steps``: updates so far; ``window``: steps in the open window, of ``length``;
    ``since``: steps since columns were chosen; ``updates``: those of the device, as its bias correction counts them.
    """

    steps: int = 0
    window: int = 0
    length: int = 0
    since: int = -1
    updates: int = 0

    def numbers(self) -> dict[str, int]:
        """Return the counts as slots."""
        return {f"{SLOT}{name}": value for name, value in asdict(self).items()}


class _Home(Transfer):
    """Masters and slots of ``policy`` that are on the device: a reader on the host waits, which brings them home."""

    def __init__(self, policy: "SelectiveUpdate") -> None:
        self._policy = policy

    def wait(self) -> None:
        self._policy.come_home()

    def done(self) -> bool:
        return not self._policy.states_out


class SelectiveUpdate(LateUpdate):
    """ZenFlow update of one engine. With ``plan.overlap`` a window's update is published at the end of the next window,
    as the delayed update does step by step; else at once.
    """

    further_slots = SLOT

    def __init__(self, host: UpdateHost, optimizer: AdamBase, plan: ColumnsPlan) -> None:
        super().__init__(host, optimizer)
        self._plan, self._counts, self._forgot = plan, Counts(), False
        self._views = [view for unit in host.units for view in unit.views]
        self._chosen: dict[nn.Parameter, Chosen] = {}  # by what the optimizer sees of a view
        self._on_device: AdamBase | None = None  # while the states of the chosen are out
        self.states_out = False
        self._busy = False  # whoever asks for states is this
        self._home = _Home(self)
        self._sums: dict[Unit, list[torch.Tensor]] = {}  # that of the window first, then spare ones
        self._adding: dict[Unit, Transfer] = {}
        self._trained: dict[Unit, set[int]] = {}  # positions that have had a gradient in the open window
        # Versions of gradients on the host whose chosen columns, and whose columns' squares, are on the device.
        self._taken: dict[Unit, int] = {}
        self._squared: dict[Unit, int] = {}
        self._squares = {unit: _room(unit) for unit in host.units if unit.trainable}
        optimizer.host_cores = plan.cores

    # -- a step --------------------------------------------------------------------------------------------------------
    def begin_step(self) -> None:
        """Begin a step without a wait: a window's update runs beside further steps, states stay on the device."""

    def wait(self) -> None:
        """Wait as ``UpdatePolicy.wait``; not within a step, where the policy waits for what it needs itself."""
        if not self._busy:
            super().wait()

    def apply(self, step: Step) -> None:
        """Update the chosen columns and add the others to the sums; at a window's end update these, too. A failure,
        from before or in here, is raised when the other ranks, which know nothing of it, have what they wait for.
        """
        failed = [] if step.failure is None else [step.failure]
        factor = float(step.factor)  # the host waits for the norm
        with self._alone():
            self._go_out(failed)
            counts, plan = self._counts, self._plan
            warm = counts.steps < plan.warm_up
            if self._due():
                self._choose(failed)
            groups, undisturbed = captured_groups(self.optimizer), self.optimizer.undisturbed()
            ends = warm or counts.window + 1 >= counts.length
            self._note_trained(begins=counts.window == 0)
            if undisturbed or not ends:
                # for whoever counts steps, as schedules do; without parameters, whose gradients may be the thread's
                _attempt(failed, lambda: step_over(self.optimizer, [[] for _ in groups]))
            _attempt(failed, lambda: self._update_chosen(groups, factor))
            if not ends:
                _attempt(failed, lambda: self._add_all(factor, begins=counts.window == 0))
            else:
                _attempt(failed, self._until_all_ended)
            if failed:
                self._serve()
                raise failed[0]
            count = counts.window + 1
            counts.steps += 1
            counts.window = 0 if ends else count
            counts.since += counts.since >= 0
            beside = plan.overlap and not warm
            if ends and self.unpublished:
                self._publish()
            elif not ends or beside:
                self._publication(masters=False).finish()
            if ends:
                self.unpublished = True
                try:
                    self._end_window(step, groups if undisturbed else None, count, beside=beside)
                except Exception:
                    if not beside:  # the other ranks, which know nothing of it, wait for this one
                        self._serve()
                    raise
                if not beside:
                    self._publish()
        self.pending = True
        if self.unpublished:
            self._publish_into_contexts()

    def _serve(self) -> None:
        with contextlib.suppress(Exception):
            self._publication(masters=False).finish()

    def _note_trained(self, *, begins: bool) -> None:
        """Note parameters trained in this window; the update includes the sum of one frozen in its middle."""
        if begins:
            self._trained.clear()
        for unit in self._units():
            self._trained.setdefault(unit, set()).update(unit.window.trained, requiring(unit.params))

    def _units(self) -> list[Unit]:
        return [unit for unit in self.host.units if unit.views]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Mark requests for states, inside the context, as the policy's own."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _end_window(self, step: Step, groups: Groups | None, count: int, *, beside: bool) -> None:
        """Begin the host's update by the mean of ``count`` steps. ``groups``: settings; None if a hook watches."""
        calls, factor = [], float(step.factor)
        for unit, unit_views in itertools.groupby(step.views, lambda view: view.unit):
            self._until_added(unit)
            landed, sums = unit.pending.until(StateKind.GRAD), self._sums_of(unit)
            store = unit.exchange_gradient_store(self._spare.pop(unit, None)) if beside else unit.rest[StateKind.GRAD]
            assert store is not None, "a step comes with gradients"
            begun = Begun(unit, WindowSum(sums.pop(0), store), unit.pending.until(StateKind.OPTIM, write=True))
            self._begun.append(begun)
            add = functools.partial(_add, begun.store.tensor, store, factor, landed, begins=count == 1)
            views = list(unit_views)
            calls.append((begun, add, views, landed, frozen_since(views, self._trained)))
        if groups is None:
            for _, add, *_ in calls:
                add()
            still = frozen_since(step.views, self._trained)
            self._put_home()  # for whoever looks, before the kernels and behind them, which go over everything
            with self.optimizer.behind_kernels(self._put_home):
                self._update_watched(step, 1 / count, still)
            self._bring_out()  # with what has been written
            return
        for begun, add, views, landed, frozen in calls:
            turn = self._turn_of(begun, views, groups, 1 / count, first=add, frozen=frozen)
            if beside:
                self._start(begun, turn, after=landed)
            else:
                turn()

    def _take_back(self, begun: Begun) -> None:
        store = begun.store
        assert isinstance(store, WindowSum)
        self._sums[begun.unit].append(store.tensor)
        if store.gradient is not begun.unit.rest.get(StateKind.GRAD):
            self._spare[begun.unit] = store.gradient

    def _publication(self, *, masters: bool = True) -> Publication:
        units = [unit for unit in self.host.units if unit.trainable]
        return self.host.publication(units, over=self._write_chosen if self.states_out else None, masters=masters)

    def _write_chosen(self, unit: Unit, piece: torch.Tensor, masters: Transfer) -> None:
        """Write chosen columns to ``piece``, PARAM over OPTIM's range, once the other ``masters`` are there."""
        masters.wait()
        for view in unit.views:
            if view.param in self._chosen and (param := self._chosen[view.param].param) is not None:
                self._chosen[view.param].put(view.within(StateKind.OPTIM, piece), param.detach().to(piece.dtype))

    # -- sums on the host ------------------------------------------------------------------------------------------
    def _sums_of(self, unit: Unit) -> list[torch.Tensor]:
        """Return places for a unit's sums: at least one, which is the open window's; others are spare."""
        places = self._sums.setdefault(unit, [])
        if not places:
            assert unit.master is not None and unit.tiers is not None
            start, stop = unit.range_of(StateKind.GRAD)
            places.append(unit.tiers.arena.empty(stop - start, dtype=unit.master.dtype))
        return places

    def _add_all(self, factor: float, *, begins: bool) -> None:
        worker = self.host.worker
        for unit in self._units():
            self._until_added(unit)
            total, store, landed = self._sums_of(unit)[0], unit.rest[StateKind.GRAD], unit.pending.until(StateKind.GRAD)
            call = functools.partial(_add, total, store, factor, landed, begins=begins)
            if worker is None:
                call()
            else:  # the last one first: the backward needs its memory first
                self._adding[unit] = turn = worker.hand_over(call, place=-unit.index, after=landed)
                unit.note_pending(turn, reads=(StateKind.GRAD,))

    def _until_all_ended(self) -> None:
        """Wait for work that this rank has begun in earlier steps, which may have failed."""
        Several([*(begun.turn for begun in self._begun), *self._adding.values()]).wait()

    def _until_added(self, unit: Unit) -> None:
        self._adding.pop(unit, ARRIVED).wait()

    # -- the device's part -----------------------------------------------------------------------------------------
    def gradient_sent(self, unit: Unit, grad: torch.Tensor) -> None:
        assert unit.grad is not None
        version = unit.grad._version
        if self.states_out:
            for view in unit.views:
                if view.param in self._chosen:
                    self._chosen[view.param].take(view.within(StateKind.GRAD, grad), self._chosen[view.param].grad)
            self._taken[unit] = version
        if self._due():
            self._square(unit, grad)
            self._squared[unit] = version

    def _due(self) -> bool:
        """Tell whether the next step chooses columns."""
        counts, plan = self._counts, self._plan
        after = plan.select or _WINDOWS[0] * counts.length
        return counts.steps >= plan.warm_up and counts.window == 0 and not 0 <= counts.since < after

    def _update_chosen(self, groups: Groups, factor: float) -> None:
        """Update the chosen columns on the device, one step."""
        self._counts.updates += self._counts.since >= 0  # also where nothing of it is this rank's
        if (optimizer := self._on_device) is None:
            return
        frozen, still = frozen_since(self._views), []
        for chosen in self._chosen.values():
            view, unit, param = chosen.view, chosen.view.unit, chosen.param
            assert unit.grad is not None and param is not None
            if self._taken.get(unit) != unit.grad._version:
                unit.wait(StateKind.GRAD)
                chosen.grad.copy_(chosen.compact(view.within(StateKind.GRAD, unit.grad)))
            param.grad = chosen.grad.mul_(factor * unit.facts.after)
            names, state = frozen.get(unit, set()), optimizer.state[param]
            for values in (param.detach(), *(state[name] for name in _MOMENTS)) if names else ():
                pieces = zip(chosen.parts, values.split(chosen.sizes), strict=True)
                still += [
                    (x, x.clone()) for (band, *_), x in pieces if unit.layout.segments[band.segment].name in names
                ]
        optimizer.update(
            [
                group | {"params": [c.param for c in self._chosen.values() if c.view.group == i]}
                for i, group in enumerate(groups)
            ]
        )
        for values, before in still:
            values.copy_(before)
        for chosen in self._chosen.values():
            assert chosen.param is not None
            chosen.param.grad = None
        self._taken.clear()

    def _square(self, unit: Unit, grad: torch.Tensor) -> None:
        """Compute the sums of squares of all columns of ``unit``, over this rank's part of its gradient."""
        widths = widths_of(unit)
        places = self._squares[unit].zero_().split(widths)
        base, stop = unit.range_of(StateKind.GRAD)
        for band in bands_of(shapes_of(unit), base, stop):
            if widths[band.segment]:
                band.squares(grad, places[band.segment])

    def _choose(self, failed: list[Exception]) -> None:
        """Choose columns anew, by the gradient of this step. Collective, even after an error in ``failed``."""
        units = [unit for unit in self.host.units if unit.trainable]
        _attempt(failed, lambda: self._come_home(leave=False))
        _attempt(failed, lambda: self._square_all(units))
        meshes: dict[tuple[int, ...], list[Unit]] = {}
        for unit in units:
            groups = unit.facts.sharing(unit.plan.of(StateKind.GRAD).spread)
            meshes.setdefault(tuple(map(id, groups)), []).append(unit)
        for members in meshes.values():  # in the same order on all ranks: that of their first units
            together = torch.cat([self._squares[unit] for unit in members])
            for group in members[0].facts.sharing(members[0].plan.of(StateKind.GRAD).spread):
                collectives.sum_in_place(together, group)
            sizes = [self._squares[unit].numel() for unit in members]
            for unit, squares in zip(members, together.split(sizes), strict=True):
                self._squares[unit].copy_(squares)
        shares, counts = torch.zeros(2, dtype=torch.float64, device=self.host.device), self._counts
        _attempt(failed, lambda: self._take_largest(units, shares))
        if self._plan.window == 0:
            rest, whole = collectives.sum_in_place(shares, self.host.mesh.job).tolist()
            longer = rest < (1 - self._plan.auto_ratio) * whole
            counts.length = min(_WINDOWS[1], 2 * counts.length) if longer else max(_WINDOWS[0], counts.length // 2)
        if counts.since < 0:
            counts.updates = max(collectives.gather_objects(self._host_updates(), self.host.mesh.job))
        counts.since = 0
        self._squared.clear()
        _attempt(failed, self._bring_out)

    def _square_all(self, units: Sequence[Unit]) -> None:
        for unit in units:
            if unit.grad is None or self._squared.get(unit) != unit.grad._version:
                unit.wait(StateKind.GRAD)
                assert unit.grad is not None
                self._square(unit, unit.grad.to(unit.device))

    def _take_largest(self, units: Sequence[Unit], shares: torch.Tensor) -> None:
        self._chosen = {}
        for unit in units:
            columns = self._largest(unit, shares)
            for view in unit.views:
                bands = bands_of(shapes_of(unit), view.start, view.stop)
                chosen = Chosen(view, [(band, columns[band.segment]) for band in bands])
                if chosen.parts:
                    self._chosen[view.param] = chosen

    def _largest(self, unit: Unit, shares: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's columns to choose; add the squares, of the others and of all, to ``shares``."""
        columns, parts = [], self._squares[unit].split(widths_of(unit))
        for segment, squares in zip(unit.layout.segments, parts, strict=True):
            count = chosen_of(segment.shape, self._plan.ratio)
            if count == 0 or len(segment.shape) < 2:
                columns.append(torch.arange(count, device=unit.device))
                continue
            order = torch.sort(squares, descending=True, stable=True)
            columns.append(torch.sort(order.indices[:count]).values)
            shares += torch.stack([order.values[count:].sum(), order.values.sum()])
        return columns

    # -- here and there --------------------------------------------------------------------------------------------
    def _host_updates(self) -> int:
        return max([0, *(int(view.kept_by(self.optimizer).get("step", 0)) for view in self._views)])

    def come_home(self) -> None:
        """Copy all states of the policy to where the masters and moments rest. Local."""
        worker = self.host.worker
        if self.states_out and not self._busy and not (worker is not None and worker.inside()):
            with self._alone(), torch.inference_mode(mode=False), torch.no_grad():  # for tensors that last
                self._come_home(leave=True)

    def _come_home(self, *, leave: bool) -> None:
        """Copy states home; ``leave``: also the sums, masks and counts from which a step or checkpoint goes on."""
        self._until_all_ended()
        self._put_home()
        counts = self._counts
        for chosen in self._chosen.values():
            chosen.param = None
        for view in self._views if leave else ():
            state = self.optimizer._state_of(view.param, self.optimizer.param_groups[view.group])
            if counts.since >= 0:  # on all ranks, also where nothing of a parameter is chosen
                state[CHOSEN] = self._mask_of(view)
            if counts.window:
                state[SUM] = view.within(StateKind.GRAD, self._sums_of(view.unit)[0])
            state |= counts.numbers()
        self._on_device, self.states_out = None, False

    def _put_home(self) -> None:
        """Copy masters and moments on the device to where they rest."""
        if (optimizer := self._on_device) is None:
            return
        for chosen in self._chosen.values():
            view, param = chosen.view, chosen.param
            assert param is not None
            view.unit.wait(StateKind.OPTIM, write=True)  # copies read it; what this policy itself waits for is done
            state = self.optimizer._state_of(view.param, self.optimizer.param_groups[view.group])
            chosen.put(view.param.detach(), param.detach().cpu())
            for name in _MOMENTS:
                chosen.put(state[name], optimizer.state[param][name].cpu())

    def _mask_of(self, view: OptimView) -> torch.Tensor:
        """Return a mask on the host, with one for each chosen element of the view."""
        mask = torch.zeros(view.stop - view.start, dtype=torch.uint8, device="cpu")
        if (chosen := self._chosen.get(view.param)) is not None:
            chosen.put(mask, torch.ones(sum(chosen.sizes), dtype=torch.uint8, device="cpu"))
            chosen.mark = mask, mask._version
        return mask

    def _go_out(self, failed: list[Exception]) -> None:
        """Take all states from where they rest; after a load the ranks agree on the counts."""
        if self.states_out:
            return
        numbers: dict[str, int] = {}
        _attempt(failed, lambda: numbers.update(self._take_states()))
        if self._forgot:
            summed = [*self._frozen_sums()] if numbers.get(f"{SLOT}window") else []
            local = (numbers, self._host_updates(), summed)
            gathered = collectives.gather_objects(local, self.host.mesh.job)
            numbers = next((saved for saved, *_ in gathered if saved), {f"{SLOT}steps": max(n for _, n, _ in gathered)})
            for index, position in itertools.chain.from_iterable(pairs for *_, pairs in gathered):
                self._trained.setdefault(self.host.units[index], set()).add(position)
        if numbers:
            self._counts = Counts(**{name.removeprefix(SLOT): value for name, value in numbers.items()})
        self._counts.length = self._plan.window or self._counts.length or _WINDOWS[0]
        self._forgot = False
        _attempt(failed, self._bring_out)

    def _take_states(self) -> dict[str, int]:
        """Take chosen columns and sums out of the optimizer's state; return the counts found there."""
        numbers: dict[str, int] = {}
        for view in self._views:
            state = view.kept_by(self.optimizer)
            mask, total = state.pop(CHOSEN, None), state.pop(SUM, None)
            counts = {name: int(state.pop(name)) for name in Counts().numbers() if name in state}
            numbers = counts or numbers
            chosen = self._chosen.pop(view.param, None)
            if chosen is None or chosen.mark is None or chosen.mark[0] is not mask or chosen.mark[1] != mask._version:
                chosen = None if mask is None else Chosen.marked_in(view, mask)
            if chosen is not None and chosen.parts:
                chosen.mark, self._chosen[view.param] = None, chosen  # a mark keeps the mask alive
            if total is not None:
                place = view.within(StateKind.GRAD, self._sums_of(view.unit)[0])
                if place.data_ptr() != total.data_ptr():
                    place.copy_(total)
        return numbers

    def _frozen_sums(self) -> Iterator[tuple[int, int]]:
        """Yield unit and position of frozen parameters of which a loaded sum of an open window is not zero."""
        for unit in self._units():
            for position in {*range(len(unit.params))}.difference(requiring(unit.params)):
                part = unit.part(StateKind.GRAD, unit.layout.segments[position], self._sums_of(unit)[0])
                if part.any():
                    yield unit.index, position

    def _bring_out(self) -> None:
        """Bring the states of chosen columns to the device."""
        self.states_out, self._on_device, self.pending = True, None, True
        for unit in self.host.units:
            unit.note_pending(self._home, writes=(StateKind.OPTIM,))
        self._taken.clear()
        if not self._chosen:
            return
        for chosen in self._chosen.values():
            chosen.param = nn.Parameter(chosen.compact(chosen.view.param.detach()))
        params = [chosen.param for chosen in self._chosen.values()]
        optimizer = self._on_device = FusedAdam([param for param in params if param is not None])
        for chosen in self._chosen.values():
            state, group = chosen.view.kept_by(self.optimizer), self.optimizer.param_groups[chosen.view.group]
            fused = group.get("fused") or group.get("capturable")
            where = chosen.grad.device if fused else torch.device("cpu")
            moments = {name: chosen.compact(state.get(name)) for name in _MOMENTS}
            step = torch.full((), float(self._counts.updates), dtype=torch.float32, device=where)
            optimizer.state[chosen.param] = {"step": step, **moments}

    def left_out(self) -> None:
        """Leave this step out: the window goes on with the next step."""

    def publish(self) -> None:
        """Publish as a delayed update does; all states come home."""
        super().publish()
        if self.host.worker is None:
            self.come_home()
        else:
            self.wait_together()

    def restart(self) -> None:
        self.come_home()
        self.forget()

    def forget(self) -> None:
        super().forget()
        self._adding.clear()
        self._trained.clear()
        self._chosen.clear()
        self._on_device, self.states_out, self._forgot = None, False, True

    def close(self) -> None:
        vars(self.optimizer).pop("host_cores", None)  # its kernels take all of them again
        self.forget()
        for kept in (self._sums, self._spare, self._squares):
            kept.clear()
        super().close()


def _attempt(failed: list[Exception], call: Callable[[], object]) -> None:
    """Run work of this rank alone in a step; its error joins ``failed``, after which no further call is tried."""
    if not failed:
        try:
            call()
        except Exception as error:
            failed.append(error)


def _add(total: torch.Tensor, store: TierStore, factor: float, landed: Transfer, *, begins: bool) -> Transfer:
    """Add a gradient times ``factor`` to ``total``, or, if it ``begins``, set ``total`` to it."""
    landed.wait()
    for piece, grad in zip(total.split(_PIECE), store.tensor.split(_PIECE), strict=True):
        if begins:
            piece.copy_(grad).mul_(factor)
        else:
            piece.add_(grad, alpha=factor)
    return ARRIVED


def _room(unit: Unit) -> torch.Tensor:
    """Allocate the sums of squares of these columns, over this rank's part of the gradient."""
    return torch.zeros(sum(widths_of(unit)), dtype=torch.float32, device=unit.device)
