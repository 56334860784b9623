"""One model, several optimizers: every parameter is measured around the step of the optimizer that has it."""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook
from watching import Output, assert_rows, attached, train, warnings_in

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(7))
EVERYTHING_OF_STEPS: dict[str, Any] = {
    "wg_distribution": True,
    "param_distribution": True,
    "mv_distribution": True,
    "update_ratio": True,
    "ops": ["norm", "min", "max", "mean"],
    "ndigits": 17,
}
KINDS = ("grad_unreduced", "grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq")
MOMENTS = {"exp_avg": ("exp_avg", "momentum_buffer"), "exp_avg_sq": ("exp_avg_sq",)}
Rows = dict[str, dict[tuple[str, int, int | None], Tensor]]


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))


def matrices_and_rest(model: nn.Module) -> tuple[Optimizer, Optimizer]:
    """The usual pair: Muon for matrices, AdamW for the rest."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return Muon(matrices, lr=0.1), AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.1)


class Reference:
    """What the rows of a loop have to be, taken down by hand around each call of an optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.rows: Rows = defaultdict(dict)
        self._names = {id(p): name for name, p in model.named_parameters()}

    def stepped(self, optimizer: Optimizer, step: int, *, skipped: bool = False) -> Iterator[None]:
        """Around a step of ``optimizer`` that belongs to ``step``."""
        held = {self._names[id(p)]: p for group in optimizer.param_groups for p in group["params"] if id(p) in self._names}
        for name, p in held.items():
            self._take("param_origin", name, step, p)
            if p.grad is not None:
                self._take("grad_reduced", name, step, p.grad)
            for kind, names in MOMENTS.items():
                state = optimizer.state.get(p, {})
                for one in names:
                    if one in state:
                        self._take(kind, name, step, state[one])
        yield
        for name, p in held.items() if not skipped else ():
            self._take("param_updated", name, step, p)

    def _take(self, kind: str, name: str, step: int, x: Tensor) -> None:
        self.rows[kind][name, step, None] = x.detach().clone()

    @contextmanager
    def around(self, optimizer: Optimizer, step: int, *, skipped: bool = False) -> Iterator[None]:
        yield from self.stepped(optimizer, step, skipped=skipped)

    def unreduced(self, names_and_gradients: Mapping[str, Tensor], step: int) -> None:
        for name, gradient in names_and_gradients.items():
            self._take("grad_unreduced", name, step, gradient)

    def hold(self, output: Output, *kinds: str) -> None:
        """The files have exactly these rows of ``kinds``, and the update of each weight is that between them."""
        for kind in kinds or KINDS:
            assert_rows(output, kind, self.rows[kind])
        ratios = {(row.name, row.step): row.values for row in output.rows("update_ratio")}
        assert sorted(ratios) == sorted(place[:2] for place in self.rows["param_updated"])
        for (name, step, _), after in self.rows["param_updated"].items():
            before = self.rows["param_origin"][name, step, None].double()
            assert ratios[name, step]["update_norm"] == pytest.approx((after.double() - before).norm().item(), rel=1e-6)


class Container:
    """Holds optimizers as torchtitan's container does that is no optimizer of torch itself."""

    def __init__(self, optimizers: Sequence[Optimizer], name: str = "optimizers") -> None:
        setattr(self, name, list(optimizers))
        self.all = list(optimizers)

    def step(self) -> None:
        for one in self.all:
            one.step()


class OptimizerContainer(Optimizer):
    """Holds optimizers, and is an optimizer of torch that knows all their parameters, as torchtitan's is."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__([p for one in optimizers for group in one.param_groups for p in group["params"]], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        for one in self.optimizers:
            one.step()


class Wrapper:
    """Wraps one optimizer, as accelerate, Lightning and DeepSpeed do."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


WAYS: dict[str, Callable[[Optimizer, Optimizer], Any]] = {
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (b, a),
    "dictionary": lambda a, b: {"matrices": a, "rest": b},
    "container": lambda a, b: Container([a, b]),
    "chained": lambda a, b: Container([a, b], "chained_optimizers"),
    "an optimizer that holds them": lambda a, b: OptimizerContainer([a, b]),
    "wrapped in a list": lambda a, b: [Wrapper(a), Wrapper(Wrapper(b))],
    "a wrapped container": lambda a, b: Wrapper(Container([a, b])),
    "nested": lambda a, b: [[a], {"rest": [b]}],
}


class TestHowTheyArePassed:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first first", "second first"])
    def test_every_parameter_is_measured_around_its_own_step(self, output: Output, way: str, order: tuple[int, int]) -> None:
        model = small_model()
        pair = matrices_and_rest(model)
        reference = Reference(model)
        with attached(output, model, WAYS[way](*pair), **EVERYTHING_OF_STEPS):
            for step in range(3):
                model(X).square().sum().backward()
                reference.unreduced({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, step)
                for optimizer in (pair[place] for place in order):
                    with reference.around(optimizer, step):
                        optimizer.step()
                model.zero_grad()
        reference.hold(output)
        assert output.manifest()["steps"]["written"]["count"] == 3

    def test_the_step_of_a_container_is_that_of_all_it_holds(self, output: Output) -> None:
        """Also of those that it leaves out: what it has done by then is the step."""
        model = small_model()
        matrices, rest = matrices_and_rest(model)
        container = OptimizerContainer([matrices, rest])
        with attached(output, model, container, **EVERYTHING_OF_STEPS):
            for _ in range(2):
                model(X).square().sum().backward()
                container.step()
                container.zero_grad()
            container.optimizers = [matrices]
            model(X).square().sum().backward()
            container.step()
        assert output.manifest()["steps"]["written"]["count"] == 3
        assert {row.name for row in output.rows("param_updated") if row.step == 2} == {"0.weight", "2.weight"}

    def test_something_in_it_that_is_no_optimizer_is_named(self, output: Output) -> None:
        model = small_model()
        with pytest.raises(TypeError, match=r"optimizer\[1\] is a str: expected a torch\.optim\.Optimizer"):
            attached(output, model, [SGD(model.parameters()), "sgd"], **EVERYTHING_OF_STEPS)

    def test_an_empty_sequence_is_refused(self, output: Output) -> None:
        with pytest.raises(TypeError, match="optimizer is a list without an optimizer"):
            attached(output, small_model(), [], **EVERYTHING_OF_STEPS)

    def test_training_is_the_same_bit_for_bit(self, output: Output) -> None:
        model = small_model()
        twin = copy.deepcopy(model)
        ours, theirs = matrices_and_rest(model), matrices_and_rest(twin)

        def train(model: nn.Module, pair: Sequence[Optimizer]) -> None:
            for _ in range(3):
                model(X).square().sum().backward()
                for one in pair:
                    one.step()
                model.zero_grad()

        with attached(output, model, ours, mg_direction=True, ur_distribution=True, format="hdf5", **EVERYTHING_OF_STEPS):
            train(model, ours)
        train(twin, theirs)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


class Gan:
    """A generator, a critic, an optimizer for each."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 1)})
        self.of_g, self.of_d = Adam(self.model["g"].parameters(), lr=0.1), Adam(self.model["d"].parameters(), lr=0.1)
        self.reference = Reference(self.model)

    def gradients(self, part: str) -> dict[str, Tensor]:
        return {f"{part}.{name}": p.grad for name, p in self.model[part].named_parameters() if p.grad is not None}

    def train_critic(self, step: int, *, unreduced: bool = True) -> None:
        self.model.zero_grad()
        with torch.no_grad():
            fake = self.model["g"](X)
        (self.model["d"](fake).mean() - self.model["d"](X).mean()).backward()
        if unreduced:
            self.reference.unreduced(self.gradients("d"), step)
        with self.reference.around(self.of_d, step):
            self.of_d.step()

    def train_generator(self, step: int) -> None:
        self.model.zero_grad()
        (-self.model["d"](self.model["g"](X)).mean()).backward()
        self.reference.unreduced(self.gradients("g"), step)
        with self.reference.around(self.of_g, step):
            self.of_g.step()


class TestWhenAStepEnds:
    """The table of docs/optimizers.md, row by row."""

    def test_a_gan_has_one_step_for_both(self, output: Output) -> None:
        """The gradients that the generator's backward leaves in the critic are of no step of the critic."""
        gan = Gan()
        with attached(output, gan.model, [gan.of_g, gan.of_d], **EVERYTHING_OF_STEPS):
            for step in range(3):
                gan.train_critic(step)
                gan.train_generator(step)
        gan.reference.hold(output)
        assert output.manifest()["steps"]["written"]["count"] == 3

    def test_forwards_of_a_critic_are_micro_steps_of_the_step(self, output: Output, caplog: pytest.LogCaptureFixture) -> None:
        """Two before it steps, and the one of the generator: none takes the row of another."""
        gan = Gan()
        config = {**EVERYTHING_OF_STEPS, "xy_distribution": True, "all_xy": True}
        with attached(output, [gan.model["g"], gan.model["d"]], [gan.of_g, gan.of_d], **config):
            for step in range(2):
                gan.train_critic(step)
                gan.train_generator(step)
        rows = [(row.step, row.micro_step) for row in output.rows("actv") if (row.chunk, row.name) == (1, ".output")]
        assert rows == [(step, micro_step) for step in range(2) for micro_step in range(3)]
        assert warnings_in(caplog) == [], "no number of micro-steps would be the true one"

    def test_a_generator_that_comes_first_leaves_nothing_in_the_critics_rows(self, output: Output) -> None:
        gan = Gan()
        with attached(output, gan.model, [gan.of_g, gan.of_d], **EVERYTHING_OF_STEPS):
            for step in range(3):
                gan.train_generator(step)
                gan.train_critic(step)
        gan.reference.hold(output)

    def test_a_critic_that_steps_five_times_ends_a_step_before_each_but_the_first(self, output: Output) -> None:
        """Its later backwards belong to the step that is then in progress, in which it has stepped: they have no rows."""
        gan = Gan()
        with attached(output, gan.model, [gan.of_g, gan.of_d], **EVERYTHING_OF_STEPS):
            step = 0
            for _ in range(2):
                for turn in range(5):
                    gan.train_critic(step + turn, unreduced=turn == 0)
                step += 4
                gan.train_generator(step)
                step += 1
        gan.reference.hold(output)
        assert output.manifest()["steps"]["written"]["count"] == 10

    def test_an_optimizer_that_an_if_leaves_out_has_no_rows_in_that_step(
        self, output: Output, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = small_model()
        matrices, rest = matrices_and_rest(model)
        reference = Reference(model)
        turns = [(matrices, 0), (rest, 0), (matrices, 1), (matrices, 2), (rest, 2), (matrices, 3), (rest, 3)]
        config = {**EVERYTHING_OF_STEPS, "xy_distribution": True, "all_xy": True}
        with attached(output, model, [matrices, rest], **config):
            for optimizer, step in turns:
                if optimizer is matrices:
                    model.zero_grad()
                    model(X).square().sum().backward()
                with reference.around(optimizer, step):
                    optimizer.step()
        reference.hold(output, "grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq")
        (said,) = [one for one in warnings_in(caplog) if "the step ended between the two" in one]
        assert "Muon of '0.weight' stepped twice before AdamW of '0.bias' stepped once" in said
        assert [(row.step, row.micro_step) for row in output.rows("actv") if row.name == ".output"] == [
            (0, 0),
            (1, 0),
            (1, 1),
            (3, 0),
        ]
        unreduced = {step: {row.name for row in output.rows("grad_unreduced") if row.step == step} for step in range(4)}
        matrix_names = {"0.weight", "2.weight"}
        assert [names & matrix_names for names in unreduced.values()] == [matrix_names, matrix_names, set(), matrix_names]

    def test_one_that_the_scaler_skips_has_had_its_turn(self, output: Output) -> None:
        model = small_model()
        matrices, rest = matrices_and_rest(model)
        reference, scaler = Reference(model), GradScaler("cpu", init_scale=8.0)
        with attached(output, model, [matrices, rest], **EVERYTHING_OF_STEPS):
            for step in range(3):
                scaler.scale(model(X).square().sum()).backward()
                if step == 1:
                    assert model[0].weight.grad is not None
                    model[0].weight.grad[0, 0] = torch.inf
                for optimizer in (matrices, rest):
                    scaler.unscale_(optimizer)
                    with reference.around(optimizer, step, skipped=step == 1 and optimizer is matrices):
                        scaler.step(optimizer)
                scaler.update()
                model.zero_grad()
        reference.hold(output, "param_origin", "param_updated", "exp_avg", "exp_avg_sq")
        manifest = output.manifest()
        assert manifest["steps"]["written"]["count"] == 3
        assert manifest["steps"]["skipped"]["count"] == 0
        assert "skipped" in manifest["notes"]["optimizers"]
        assert [row.values["max"] for row in output.rows("other") if row.name == "loss_scale"] == [8.0, 8.0, 4.0]

    def test_a_step_in_which_the_scaler_skips_every_optimizer_is_skipped(self, output: Output) -> None:
        model = small_model()
        pair, scaler = matrices_and_rest(model), GradScaler("cpu", init_scale=8.0)
        with attached(output, model, Container(pair), **EVERYTHING_OF_STEPS):
            for step in range(2):
                scaler.scale(model(X).square().sum()).backward()
                for p in model.parameters() if step == 0 else ():
                    assert p.grad is not None
                    p.grad.fill_(torch.inf)
                for optimizer in pair:
                    scaler.step(optimizer)
                scaler.update()
                model.zero_grad()
        steps = output.manifest()["steps"]
        assert (steps["written"]["count"], steps["skipped"]["ranges"][0][:2]) == (2, [0, 0])

    def test_scalers_of_their_own_have_rows_of_their_own(self, output: Output) -> None:
        model = small_model()
        pair = matrices_and_rest(model)
        scalers = GradScaler("cpu", init_scale=2.0), GradScaler("cpu", init_scale=4.0)
        with attached(output, model, pair, **EVERYTHING_OF_STEPS):
            model(X).square().sum().backward()
            for scaler, optimizer in zip(scalers, pair, strict=True):
                scaler.scale(torch.ones(()))
                scaler.step(optimizer)
        assert {row.name: row.values["max"] for row in output.rows("other")} == {"loss_scale": 2.0, "loss_scale_1": 4.0}

    def test_a_second_model_that_is_only_evaluated_has_no_rows_of_steps(self, output: Output) -> None:
        model, judge = small_model(), small_model(1)
        optimizer = AdamW(model.parameters(), lr=0.1)
        reference = Reference(model)
        config = {**EVERYTHING_OF_STEPS, "xy_distribution": True, "all_xy": True}
        judge.requires_grad_(False).eval()
        with attached(output, [model, judge], optimizer, **config):
            for step in range(2):
                (model(X) - judge(X)).square().sum().backward()
                with reference.around(optimizer, step):
                    optimizer.step()
                optimizer.zero_grad()
        assert {row.chunk for row in output.rows("grad_reduced")} == {0}
        assert {row.chunk for row in output.rows("actv")} == {0}
        assert output.manifest()["steps"]["written"]["count"] == 2

    def test_an_optimizer_that_never_steps_is_said(self, output: Output, caplog: pytest.LogCaptureFixture) -> None:
        model = small_model()
        passed = SGD(model.parameters(), lr=0.1)
        with attached(output, model, passed, **EVERYTHING_OF_STEPS):
            for _ in range(2):
                model(X).square().sum().backward()
                with torch.no_grad():
                    model[0].weight -= 0.1 * model[0].weight.grad
        assert [said for said in warnings_in(caplog) if "no optimizer that was passed to set_monitor has stepped (SGD)" in said]


class TestWrappers:
    @pytest.mark.parametrize("attribute", ["optimizer", "original_optimizer", "_base_optimizer"])
    def test_a_wrapper_without_hooks_is_followed_to_the_optimizer_that_it_keeps(self, attribute: str, output: Output) -> None:
        """As that of Opacus, which fills ``.grad`` in its step, and whose class is one of torch."""

        class Noisy(Optimizer):
            def __init__(self, optimizer: Optimizer) -> None:
                setattr(self, attribute, optimizer)
                self.param_groups, self.state = optimizer.param_groups, optimizer.state

            def step(self, closure: None = None) -> None:  # type: ignore[override]
                del closure
                for p in self.param_groups[0]["params"]:
                    p.grad = p.grad * 2 + 0.5
                with reference.around(inner, step):
                    inner.step()

        model = small_model()
        reference, inner = Reference(model), Adam(model.parameters(), lr=0.1)
        with attached(output, model, Noisy(inner), **EVERYTHING_OF_STEPS):
            for step in range(3):
                model(X).square().sum().backward()
                reference.unreduced({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, step)
                Noisy(inner).step()
                model.zero_grad()
        reference.hold(output)

    def test_a_wrapper_that_changes_weights_after_the_step_ends_it(self, output: Output) -> None:
        """As Lookahead does: the weights after the step are those that the wrapper leaves."""

        class Halving(Optimizer):
            def __init__(self, optimizer: Optimizer) -> None:
                self.optimizer = optimizer
                super().__init__(optimizer.param_groups, {})

            @torch.no_grad()
            def step(self, closure: None = None) -> None:  # type: ignore[override]
                del closure
                self.optimizer.step()
                for group in self.param_groups:
                    for p in group["params"]:
                        p.mul_(0.5)

        model = small_model()
        inner = SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer, reference = Halving(inner), Reference(model)
        with attached(output, model, optimizer, **EVERYTHING_OF_STEPS):
            for step in range(2):
                model(X).square().sum().backward()
                reference.unreduced({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, step)
                with reference.around(inner, step):
                    optimizer.step()
                model.zero_grad()
        reference.hold(output)

    @pytest.mark.parametrize("every", [1, 2])
    def test_a_wrapper_that_changes_weights_before_the_step_begins_it(self, output: Output, every: int) -> None:
        """As a Schedule-Free wrapper does: the weights before the step are those of the forward. It may leave steps out."""

        class Shifting(Optimizer):
            def __init__(self, optimizer: Optimizer) -> None:
                self.optimizer, self.calls = optimizer, 0
                super().__init__(optimizer.param_groups, {})

            @torch.no_grad()
            def step(self, closure: None = None) -> None:  # type: ignore[override]
                del closure
                self.calls += 1
                if self.calls % every == 0:
                    for p in self.param_groups[0]["params"]:
                        p.add_(0.5)
                    self.param_groups[0]["lr"] = 0.01
                    self.optimizer.step()

        model = small_model()
        inner = SGD(model.parameters(), lr=0.1)
        optimizer, expected = Shifting(inner), []
        kinds: dict[str, Any] = {"param_distribution": True, "update_ratio": True, "run_numbers": True, "ops": ["norm"]}
        with attached(output, model, optimizer, grad_acc_steps=every, **kinds):
            for call in range(4):
                model(X).square().sum().backward()
                before = {name: p.detach().clone() for name, p in model.named_parameters()}
                optimizer.step()
                if (call + 1) % every == 0:
                    step = call // every
                    expected += [(step, name, p.detach() - before[name], before[name]) for name, p in model.named_parameters()]
                    model.zero_grad()
        ratios = {(row.step, row.name): row.values for row in output.rows("update_ratio")}
        origins = {(row.step, row.name): row.values["norm"] for row in output.rows("param_origin")}
        for step, name, update, weight in expected:
            assert origins[step, name] == pytest.approx(weight.norm().item(), rel=1e-5)
            assert ratios[step, name]["update_norm"] == pytest.approx(update.norm().item(), rel=1e-4)
        assert len(origins) == len(expected)
        assert {row.values["value"] for row in output.rows("run") if row.name == "learning_rate.0"} == {0.01}

    def test_an_optimizer_that_calls_no_hooks_is_refused_unless_it_wraps_one(self, output: Output) -> None:
        class Bare(Optimizer):
            def __init__(self, optim: Any = None) -> None:
                self.optim = optim

        model = small_model()
        with pytest.raises(TypeError, match="optimizer is a Bare, which calls no optimizer hooks"):
            attached(output, model, Bare(), **EVERYTHING_OF_STEPS)
        attached(output, model, Bare(SGD(model.parameters())), **EVERYTHING_OF_STEPS).close()


class TestInsideBackward:
    """One optimizer a parameter, which steps as soon as backward has accumulated its gradient."""

    @staticmethod
    def hook(model: nn.Module, optimizers: Mapping[nn.Parameter, Optimizer]) -> None:
        def step(p: Tensor) -> None:
            assert isinstance(p, nn.Parameter)
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)

    def test_a_backward_is_a_step(self, output: Output) -> None:
        model, twin = small_model(), small_model()
        optimizers = {p: Adam([p], lr=0.1) for p in model.parameters()}
        at_once = Adam(twin.parameters(), lr=0.1)
        reference = Reference(twin)
        self.hook(model, optimizers)
        with attached(output, model, optimizers, **EVERYTHING_OF_STEPS):
            for step in range(3):
                model(X).square().sum().backward()
                twin(X).square().sum().backward()
                reference.unreduced({name: p.grad for name, p in twin.named_parameters() if p.grad is not None}, step)
                with reference.around(at_once, step):
                    at_once.step()
                at_once.zero_grad()
        reference.hold(output)
        assert output.manifest()["steps"]["written"]["count"] == 3

    def test_the_step_of_their_container_ends_the_step_of_those_that_were_reached(self, output: Output) -> None:
        model = small_model()
        optimizers = {p: Adam([p], lr=0.1) for p in model.parameters()}
        container = OptimizerContainer(list(optimizers.values()))
        self.hook(model, optimizers)
        with attached(output, model, container, **EVERYTHING_OF_STEPS):
            container.optimizers = []  # whose step does nothing, since all have stepped
            for part in (model, model[:2], model):
                part(X).square().sum().backward()
                container.step()
        names = {step: {row.name for row in output.rows("param_updated") if row.step == step} for step in range(3)}
        assert names[0] == names[2] == {name for name, _ in model.named_parameters()}
        assert names[1] == {"0.weight", "0.bias", "1.weight", "1.bias"}


class TestWhatNoOptimizerHolds:
    def test_it_has_no_rows_and_is_named_once(self, output: Output, caplog: pytest.LogCaptureFixture) -> None:
        model = small_model()
        matrices, rest = matrices_and_rest(model)
        reference = Reference(model)
        with attached(output, model, matrices, **EVERYTHING_OF_STEPS):
            for step in range(2):
                model(X).square().sum().backward()
                reference.unreduced({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, step)
                with reference.around(matrices, step):
                    matrices.step()
                rest.step()
                model.zero_grad()
        reference.hold(output)
        said = [one for one in warnings_in(caplog) if "no optimizer that was passed to set_monitor" in one]
        assert len(said) == 1
        assert "4 of 6 parameters" in said[0]
        assert "0.bias, 1.weight, 1.bias and 1 more" in said[0]
        assert said[0].endswith(output.manifest()["notes"]["parameters"])

    @pytest.mark.parametrize("trained", [False, True])
    def test_a_target_network_that_nothing_trains_is_no_failure(
        self, trained: bool, output: Output, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It requires gradients and gets none, as in reinforcement learning. Once it gets one, an optimizer is missing."""
        model = nn.ModuleDict({"online": small_model(), "target": small_model()})
        optimizer = SGD(model["online"].parameters(), lr=0.1)
        with attached(output, model, optimizer, **EVERYTHING_OF_STEPS):
            for step in range(3):
                with torch.set_grad_enabled(trained and step == 2):
                    wanted = model["target"](X)
                (model["online"](X) - wanted).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        said = [one for one in warnings_in(caplog) if "no optimizer that was passed to set_monitor" in one]
        assert ["None of them has a gradient" in one for one in said] == [True, *[False] * trained]
        assert all("6 of 12 parameters belong" in one for one in said)
        assert ("parameters of no optimizer" in output.manifest()["failures"]) == trained

    def test_a_frozen_parameter_is_read_around_the_first_optimizer(
        self, output: Output, caplog: pytest.LogCaptureFixture
    ) -> None:
        """No optimizer is missing: it stays as it is."""
        model = small_model()
        model[0].requires_grad_(False)
        optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        with attached(output, model, optimizer, **EVERYTHING_OF_STEPS):
            model(X).square().sum().backward()
            optimizer.step()
        assert len(output.rows("param_updated")) == 6
        assert not [one for one in warnings_in(caplog) if "no optimizer" in one]

    def test_a_parameter_that_a_group_takes_in_later_has_rows_from_then_on(self, output: Output) -> None:
        model = small_model()
        optimizer = SGD(model[0].parameters(), lr=0.1)
        with attached(output, model, optimizer, **EVERYTHING_OF_STEPS):
            for step in range(2):
                model(X).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    optimizer.add_param_group({"params": model[2].parameters()})
        rows = output.rows("param_updated")
        assert [row.name for row in rows if row.step == 0] == ["0.weight", "0.bias"]
        assert [row.name for row in rows if row.step == 1] == ["0.weight", "0.bias", "2.weight", "2.bias"]

    def test_a_parameter_of_two_optimizers_is_measured_around_the_first(self, output: Output) -> None:
        model = small_model()
        first, second = SGD(model.parameters(), lr=0.1, momentum=0.9), Adam(model[0].parameters(), lr=0.1)
        reference = Reference(model)
        with attached(output, model, [first, second], **EVERYTHING_OF_STEPS):
            for step in range(2):
                model(X).square().sum().backward()
                with reference.around(first, step):
                    first.step()
                second.step()
                model.zero_grad()
        reference.hold(output, "grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq")


class Stacking(Optimizer):
    """Keeps the momenta of a group of equal shapes in one tensor, under the group's first parameter, as nanochat's does."""

    def __init__(self, parameters: Any, *, padded: int = 0) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self._padded = padded

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            parameters = group["params"]
            state = self.state[parameters[0]]
            gradients = torch.stack([p.grad for p in parameters])
            if not state:
                shape = len(parameters) + self._padded, *parameters[0].shape
                state["momentum_buffer"] = torch.zeros(shape)
                state["second_momentum_buffer"] = torch.zeros(shape[0], *shape[1:-1], 1)
            momenta = state["momentum_buffer"][: len(parameters)]
            momenta.lerp_(gradients, 0.1)
            for p, momentum in zip(parameters, momenta, strict=True):
                p.sub_(momentum, alpha=0.1)


class TestStateThatIsNotTheParameters:
    def test_a_stack_is_looked_at_anew_when_its_group_changes(self, output: Output) -> None:
        model = self.three()
        optimizer = Stacking(model.parameters())
        expected: dict[tuple[str, int, int | None], Tensor] = {}
        with attached(output, model, optimizer, **EVERYTHING_OF_STEPS):
            for step in range(3):
                if step == 2:
                    gone = optimizer.param_groups[0]["params"].pop(0)
                    gone.requires_grad_(False)
                    optimizer.state[model[1].weight]["momentum_buffer"] = optimizer.state[gone]["momentum_buffer"][1:]
                model(X).square().sum().backward()
                names = ["0.weight", "1.weight", "2.weight"][int(step == 2) :] if step else []
                first = optimizer.param_groups[0]["params"][0]
                for place, name in enumerate(names):
                    expected[name, step, None] = optimizer.state[first]["momentum_buffer"][place].clone()
                optimizer.step()
                optimizer.zero_grad()
        assert_rows(output, "exp_avg", expected)

    def three(self) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))

    def test_stacked_momenta_are_taken_apart(self, output: Output) -> None:
        model = self.three()
        optimizer = Stacking(model.parameters())
        expected: dict[tuple[str, int, int | None], Tensor] = {}
        with attached(output, model, optimizer, **EVERYTHING_OF_STEPS):
            for step in range(3):
                model(X).square().sum().backward()
                stack = optimizer.state[model[0].weight].get("momentum_buffer") if step else ()
                for name, momentum in zip(["0.weight", "1.weight", "2.weight"], stack, strict=False):
                    expected[name, step, None] = momentum.clone()
                optimizer.step()
                optimizer.zero_grad()
        assert_rows(output, "exp_avg", expected)
        assert output.rows("exp_avg_sq") == []
        assert "second_momentum_buffer" in output.manifest()["notes"]["optimizer_state"]

    def test_a_stack_whose_layout_is_not_known_has_no_rows_and_a_reason(self, output: Output) -> None:
        model = self.three()
        optimizer = Stacking(model.parameters(), padded=1)
        with attached(output, model, optimizer, **EVERYTHING_OF_STEPS):
            for _ in range(2):
                model(X).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert output.rows("exp_avg") == []
        said = output.manifest()["notes"]["optimizer_state"]
        assert "state['momentum_buffer'] of Stacking is (4, 4, 4), float32, but the parameter is (4, 4), float32" in said

    def test_factored_moments_have_no_rows_and_a_reason(self, output: Output, caplog: pytest.LogCaptureFixture) -> None:
        model = self.three()
        optimizer = Adafactor(model.parameters())
        with attached(output, model, optimizer, mv_distribution=True, ops=["norm"]):
            for _ in range(3):
                model(X).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert [output.rows(kind) for kind in MOMENTS] == [[], []]
        assert "Adafactor keeps 'row_var', 'col_var'" in output.manifest()["notes"]["optimizer_state"]
        assert [one for one in warnings_in(caplog) if "mv_distribution" in one and "no row" in one]

    def test_an_optimizer_of_which_each_rank_steps_some_parameters_has_the_rows_of_its_own(
        self, output: Output, tmp_path: Path
    ) -> None:
        features = {"mg_direction": True, "ur_distribution": True, "optimizer_health": True, "format": ["csv", "hdf5"]}
        found, known = list[Any](), set[Path]()
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            for redundant in (False, True):
                model = self.three()
                own = AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9))
                made = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.1, betas=(0.8, 0.9)) if redundant else own
                with attached(output, model, made, **EVERYTHING_OF_STEPS, **features):
                    train(model, made, 3, X)
                kinds = (*KINDS, "update_ratio", "optimizer_health", "other", "adam_update", "adam_ratio")
                (directory,) = set(output.directories()) - known
                known.add(directory)
                found.append({kind: output.rows(kind, directory) for kind in kinds})
                assert "optimizer_state" not in json.loads((directory / "manifest.json").read_text())["notes"]
        finally:
            dist.destroy_process_group()
        assert all(found[0].values())
        assert found[0] == found[1]

    def test_weights_that_an_optimizer_steps_by_one_of_its_own_are_compared_between_steps(
        self, output: Output, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            model = self.three()
            made = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.1)
            with attached(output, model, made, param_distribution=True, replica_check=True, ops=["norm"]):
                train(model, made, 2, X)
                next(model.parameters()).data[0] += 1.0
                train(model, made, 1, X)
        finally:
            dist.destroy_process_group()
        assert [one for one in warnings_in(caplog) if "changed after the optimizer's step 1 and before step 2" in one]
        assert [key for key in output.manifest()["notes"] if "several optimizers" in key] == []

    def test_quantized_moments_have_no_rows_and_a_reason(self, output: Output) -> None:
        model = self.three()
        optimizer = Adam(model.parameters())
        with attached(output, model, optimizer, **EVERYTHING_OF_STEPS):
            model(X).square().sum().backward()
            optimizer.step()
            for state in optimizer.state.values():
                state["exp_avg"] = state["exp_avg"].to(torch.int8)
            with pytest.raises(RuntimeError):
                optimizer.step()
        assert output.rows("exp_avg") == []
        assert "int8" in output.manifest()["notes"]["optimizer_state"]

    @pytest.mark.parametrize("key", [0, "momentum_buffer"])
    def test_state_in_dictionaries_is_named(self, output: Output, key: Any) -> None:
        """Heavyball keeps a dictionary for each view of a parameter, and AggMo one of the momenta of several betas."""

        class Nesting(SGD):
            @torch.no_grad()
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                del closure
                for p in self.param_groups[0]["params"]:
                    self.state[p] = {key: {0.9: p.grad.clone()}}

        model = self.three()
        optimizer = Nesting(model.parameters(), lr=0.1)
        with attached(output, model, optimizer, **EVERYTHING_OF_STEPS):
            for _ in range(2):
                model(X).square().sum().backward()
                optimizer.step()
        assert output.rows("exp_avg") == []
        assert f"Nesting keeps {key!r}, which is not known" in output.manifest()["notes"]["optimizer_state"]

    def test_moments_that_are_made_before_the_first_step_are_none(self, output: Output) -> None:
        model = self.three()
        optimizer = Adam(model.parameters(), lr=0.1)
        for p in model.parameters():
            optimizer.state[p] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
        with attached(output, model, optimizer, **EVERYTHING_OF_STEPS):
            for _ in range(2):
                model(X).square().sum().backward()
                optimizer.step()
        assert {row.step for row in output.rows("exp_avg")} == {1}

    def test_moments_of_another_precision_than_the_weights_are_recorded(self, output: Output) -> None:
        model = self.three().to(torch.bfloat16)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        with attached(output, model, optimizer, **EVERYTHING_OF_STEPS):
            for _ in range(2):
                model(X.to(torch.bfloat16)).square().sum().backward()
                optimizer.step()
                for p in model.parameters():
                    optimizer.state[p]["momentum_buffer"] = optimizer.state[p]["momentum_buffer"].float()
                    p.grad = None
        assert len(output.rows("exp_avg")) == 3


# Optimizers and parameters that change while training runs.


def test_an_optimizer_that_takes_the_place_of_another_ends_steps_until_it_is_passed(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model()
    first, second = AdamW(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.1, momentum=0.9)
    local: list[float] = []
    with attached(output, model, first, wg_distribution=True, param_distribution=True, ops=["norm"], ndigits=17) as monitor:
        for step, optimizer in enumerate((first, second, second, second)):
            if step == 3:
                monitor.set_monitor(model, grad_acc_steps=1, optimizer=second)
            model(X).square().sum().backward()
            local.append(model[0].weight.grad.norm().item())
            optimizer.step()
            optimizer.zero_grad()

    rows = [row for row in output.rows("grad_unreduced") if row.name == "0.weight"]
    assert [(row.step, row.values["norm"]) for row in rows] == [(n, pytest.approx(norm)) for n, norm in enumerate(local)]
    assert {row.step for kind in ("grad_reduced", "param_updated") for row in output.rows(kind)} == {0, 3}
    said = "not passed to set_monitor (SGD) has stepped all parameters of one that was (AdamW)"
    assert [said in one for one in warnings_in(caplog)] == [True]


def frozen_in_part(model: nn.Sequential) -> list[Optimizer]:
    model[0].requires_grad_(False)
    return [AdamW(model[2].parameters(), lr=0.1)]


def one_for_each_layer(model: nn.Sequential) -> list[Optimizer]:
    return [SGD(model[0].parameters(), lr=0.1), AdamW(model[2].parameters(), lr=0.1)]


def of_new_parameters(model: nn.Sequential) -> list[Optimizer]:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return [AdamW(model.parameters(), lr=0.1)]


@pytest.mark.parametrize("replacement", [frozen_in_part, one_for_each_layer, of_new_parameters])
@pytest.mark.parametrize("interval", [1, 2])
def test_optimizers_of_some_or_of_new_parameters_take_the_place_of_one(
    output: Output,
    caplog: pytest.LogCaptureFixture,
    replacement: Callable[[nn.Sequential], list[Optimizer]],
    interval: int,
) -> None:
    model = small_model()
    optimizers: list[Optimizer] = [AdamW(model.parameters(), lr=0.1)]
    outputs: dict[int, float] = {}
    with attached(
        output, model, optimizers[0], grad_acc_steps=2, xy_distribution=True, param_distribution=True, ops=["norm"], ndigits=17,
        step_interval=interval, targets={"0": {}}, all_xy=True,
    ):  # fmt: skip
        for step in range(6):
            if step == 3:
                optimizers = replacement(model)
            for _ in range(2):
                out = model(X)
                out.square().sum().backward()
            outputs[step] = out.detach().norm().item()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    rows = [row for row in output.rows("actv") if row.name == ".output" and row.micro_step == 1]
    collected = range(0, 6, interval)
    assert [(row.step, row.values["norm"]) for row in rows] == [(step, pytest.approx(outputs[step])) for step in collected]
    assert {row.step for row in output.rows("param_updated")} == set(collected) & {0, 1, 2}
    (said,) = warnings_in(caplog)
    assert "All 2 forwards of a step were made, and only an optimizer that was not passed" in said


def test_optimizers_of_other_models_and_of_a_part_beside_the_passed_one_take_no_place(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = small_model(), small_model()
    passed, of_part, of_other = SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1), SGD(other.parameters())
    with attached(output, model, passed, xy_distribution=True, ops=["norm"]):
        for _ in range(3):
            model(X).square().sum().backward()
            of_part.step()
            of_other.step()
            with torch.no_grad():
                other(X)
            passed.step()
            passed.zero_grad()
    assert {row.step for row in output.rows("actv")} == {0, 1, 2}
    assert {row.micro_step for row in output.rows("actv")} == {0}
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("first", [False, True])
def test_another_optimizer_of_the_same_parameters_takes_no_place(
    output: Output, caplog: pytest.LogCaptureFixture, first: bool
) -> None:
    """One that decays weights in the same step, before or after the one that was passed."""
    model = small_model()
    passed, decaying = AdamW(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    with attached(output, model, passed, wg_distribution=True, ops=["norm"]):
        for _ in range(3):
            model(X).square().sum().backward()
            for one in (decaying, passed) if first else (passed, decaying):
                one.step()
            passed.zero_grad()
    for kind in ("grad_unreduced", "grad_reduced"):
        assert {row.step for row in output.rows(kind)} == {0, 1, 2}
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("order", [("passed", "second"), ("second", "passed"), ("passed", "other"), ("other", "passed")])
def test_weights_that_two_optimizers_step_are_no_corrupted_memory(output: Output, order: tuple[str, str]) -> None:
    """As an encoder that a generator and a discriminator share. The second one is passed, too; the other is not."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    steps: dict[str, Optimizer] = {
        "passed": AdamW(model.parameters(), lr=0.1),
        **{one: SGD(model[0].parameters(), lr=0.1) for one in ("second", "other")},
    }
    passed = [steps["passed"], *([steps["second"]] if "second" in order else [])]
    with attached(output, model, passed, param_distribution=True, replica_check=True, ops=["norm"]):
        for step in range(4):
            if step == 3:
                with torch.no_grad():
                    model[3].bias[1] += 1
            model(X).square().sum().backward()
            for one in order:
                steps[one].step()
            model.zero_grad()
    (found,) = output.manifest()["wrong_bits"]
    assert (found["step"], found["names"]) == (3, ["3.bias"])
    assert "2 weights are stepped by several optimizers: 0.bias, 0.weight." in str(output.manifest()["notes"])


def test_a_container_that_steps_the_passed_optimizers_takes_the_place_of_none(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    class Both(Optimizer):
        def step(self, _closure: Any = None) -> None:
            for one in pair:
                one.step()

    model = small_model()
    pair = matrices_and_rest(model)
    both = Both(model.parameters(), {})
    with attached(output, model, list(pair), wg_distribution=True, ops=["norm"]):
        for _ in range(3):
            model(X).square().sum().backward()
            both.step()
    assert {row.step for row in output.rows("grad_reduced")} == {0, 1, 2}
    assert warnings_in(caplog) == []


def test_parameters_that_come_while_training_runs_are_named_and_have_rows_after_attaching_again(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, param_distribution=True, ops=["norm"], ndigits=17) as monitor:
        for step in range(3):
            if step == 1:
                model.append(nn.Linear(4, 4))
                optimizer.add_param_group({"params": [*model[3].parameters()]})
            if step == 2:
                monitor.set_monitor(model, grad_acc_steps=1, optimizer=optimizer)
            model(X).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    rows = {(row.step, row.name): row.values["norm"] for row in output.rows("param_updated") if row.name.startswith("3.")}
    expected = {(2, f"3.{name}"): p.detach().norm().item() for name, p in model[3].named_parameters()}
    assert rows == pytest.approx(expected)
    assert "(3.weight, 3.bias). They have no rows" in warnings_in(caplog)[0]
    assert "3.weight, 3.bias" in output.manifest()["notes"]["new_parameters"]


def test_a_parameter_that_was_replaced_has_no_rows_under_the_name_of_the_new_one(output: Output) -> None:
    model = small_model()
    optimizer = AdamW(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, **EVERYTHING_OF_STEPS):
        for step in range(3):
            if step == 1:
                model[2] = nn.Linear(4, 4)
                optimizer.add_param_group({"params": [*model[2].parameters()]})
            model(X).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = {(row.step, row.name) for kind in (*KINDS, "update_ratio") for row in output.rows(kind)}
    names = {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert rows == {(step, name) for step in range(3) for name in names} | {(0, "2.weight"), (0, "2.bias")}


def test_a_monitor_may_be_attached_and_closed_in_a_hook_of_all_optimizers(output: Output) -> None:
    """Torch iterates over a dictionary of hooks meanwhile."""
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    monitors: list[Any] = []

    def attach_and_close(*_: Any) -> None:
        for one in monitors:
            one.close()
        monitors[:] = [attached(output, model, optimizer, param_distribution=True, ops=["norm"])]

    handle = register_optimizer_step_post_hook(attach_and_close)
    try:
        train(model, optimizer, 3, X)
    finally:
        handle.remove()
    train(model, optimizer, 1, X)
    monitors[0].close()
    assert not _global_optimizer_post_hooks
    assert len(output.directories()) == 3


def test_a_monitor_that_is_closed_in_a_hook_of_all_optimizers_leaves_a_hook_that_does_nothing(output: Output) -> None:
    model = small_model()
    optimizer, other = (SGD(model.parameters(), lr=0.1) for _ in range(2))
    monitor = attached(output, model, optimizer, wg_distribution=True, ops=["norm"])
    handle = register_optimizer_step_post_hook(lambda *_: monitor.close())
    try:
        train(model, optimizer, 1, X)
    finally:
        handle.remove()
    train(model, other, 2, X)
    assert {row.step for row in output.rows("grad_reduced")} == {0}


def test_a_step_within_that_of_another_optimizer_is_said(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    outer, inner = (torch.optim.SGD(model[name].parameters(), lr=0.1) for name in "ab")
    with attached(output, model, [outer, inner], update_ratio=True):
        within = outer.register_step_pre_hook(lambda *_: inner.step())
        for nested in (True, False):
            (model["a"](torch.ones(1, 2)) + model["b"](torch.ones(1, 2))).sum().backward()
            outer.step()
            if nested:
                within.remove()
            else:
                inner.step()
    rows = {(row.name, row.step) for row in output.rows("update_ratio")}
    every = {(f"{name}.{part}", step) for name in "ab" for part in ("weight", "bias") for step in range(2)}
    assert every - rows == {("a.weight", 0), ("a.bias", 0)}
    assert sum("a.weight" in line and "began its step before" in line for line in warnings_in(caplog)) == 1
