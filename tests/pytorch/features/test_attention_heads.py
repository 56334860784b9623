"""Each head's greatest score, entropy and weight on sinks are those of the definition; its rows combine as defined."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from definitions import head_numbers, rows_of_heads
from observing import drawn
from torch import Tensor, nn
from torch.nn import functional as F
from watching import Output, attached, on_two_ranks, warnings_in

from monitor import read_merged
from monitor.merge.merge import Wanted, merge
from monitor.pytorch.features import attention
from monitor.pytorch.features.attention import Logits, Modification, Scores, Source, heads_of, spread, summed

SDPA = F.scaled_dot_product_attention
FORMAT: dict[str, Any] = {"recording_l2_features": True, "ndigits": 17, "ops": ["norm"]}


def seen_of(scores: Source) -> Tensor:
    """All scores at once, float64."""
    batch, heads, queries, keys = scores.shape
    rows = [scores.block(row, slice(0, heads), slice(0, queries), slice(0, keys)).double() for row in range(batch)]
    return torch.stack(rows)


def numbers(scores: Source, heads: int | None = None, **how: Any) -> dict[str, float | None]:
    """The columns of a row: of one head, or of all of them."""
    found = spread(scores, 0, 0, how.pop("sinks", 1), how.pop("bound", 100.0))
    one = summed(found) if heads is None else heads_of(found)[heads]
    queries, sinks = float(one.queries), float(one.sink_queries)
    return {
        "max_logit": float(one.logit),
        "heads_above": float(one.above) / float(one.heads),
        "entropy": float(one.entropy) / queries,
        "sink": float(one.sink) / sinks if sinks else None,
    }


def defined(query: Tensor, key: Tensor, *, seen: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Scores by definition, float64."""
    query, key = query.double(), key.double()
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query @ key.mT * (query.shape[3] ** -0.5 if scale is None else scale)
    return scores if seen is None else scores.masked_fill(~seen, -math.inf)


def causal_of(queries: int, window: int = 10**6) -> Tensor:
    return torch.ones(queries, queries, dtype=torch.bool).tril().triu(1 - window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("sinks", [1, 3, 16])
def test_a_head_has_the_numbers_of_its_definition(dtype: torch.dtype, sinks: int) -> None:
    query, key = 4 * drawn(2, 4, 17, 8, dtype=dtype), drawn(2, 2, 17, 8, seed=1, dtype=dtype)
    scores, expected = Scores(query, key, True, 0.5), defined(query, key, seen=causal_of(17), scale=0.5)
    bound = expected.amax((0, 2, 3)).median().item()
    assert numbers(scores, sinks=sinks, bound=bound) == pytest.approx(
        head_numbers(expected, bound=bound, sinks=sinks), rel=1e-5
    )
    for head in range(4):
        one = head_numbers(expected[:, head : head + 1], bound=bound, sinks=sinks)
        assert numbers(scores, head, sinks=sinks, bound=bound) == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize(("block", "keys"), [(1, 1), (64, 8), (100, 7)])
def test_the_size_of_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch, block: int, keys: int) -> None:
    query, key = 4 * drawn(2, 3, 29, 4), drawn(2, 3, 29, 4, seed=1)
    expected = head_numbers(defined(query, key, seen=causal_of(29)), sinks=9)
    monkeypatch.setattr(attention, "BLOCK", block)
    monkeypatch.setattr(attention, "KEYS", keys)
    assert numbers(Scores(query, key, True, 0.5), sinks=9) == pytest.approx(expected, rel=1e-5)
    assert numbers(Logits(defined(query, key, seen=causal_of(29)).float()), sinks=9) == pytest.approx(expected, rel=1e-5)


def test_a_query_counts_for_the_sinks_if_it_sees_one_and_another_key() -> None:
    """In a window of three, queries 1 and 2 see key 0 and another one."""
    query, key = drawn(1, 1, 6, 4), drawn(1, 1, 6, 4, seed=1)
    seen = causal_of(6, 3)
    weights = torch.softmax(defined(query, key, seen=seen), -1)[0, 0, :, 0]
    (one,) = heads_of(spread(Scores(query, key, False, 0.5, seen)))
    assert (one.sink_queries, one.sink) == (2, pytest.approx((weights[1] + weights[2]).item(), rel=1e-6))


@pytest.mark.parametrize("sinks", [6, 40])
def test_without_a_key_behind_the_sinks_there_is_no_weight_on_them(sinks: int) -> None:
    assert numbers(Scores(drawn(1, 1, 6, 4), drawn(1, 1, 6, 4, seed=1), True, 0.5), sinks=sinks)["sink"] is None


def test_a_sink_that_takes_all_the_weight_is_no_mask() -> None:
    """The other keys are 1,000 below, where their weights vanish, but the queries see them."""
    logits = torch.zeros(1, 1, 4, 4)
    logits[..., 0] = 1000.0
    assert numbers(Logits(logits))["sink"] == 1.0
    logits[..., 1:] = -1e4  # as masks do
    assert numbers(Logits(logits))["sink"] is None


@pytest.mark.parametrize("least", [torch.finfo(torch.float32).min, -math.inf])
def test_queries_that_see_no_key_are_left_out(least: float) -> None:
    query, key = drawn(1, 2, 5, 4), drawn(1, 2, 5, 4, seed=1)
    mask = torch.full((5, 5), least).triu(1)
    mask[:2] = least
    expected = head_numbers(defined(query, key, seen=causal_of(5))[:, :, 2:])
    for scores in (Scores(query, key, False, 0.5, mask), Logits(defined(query, key).float() + mask)):
        assert int(summed(spread(scores, 0)).queries) == 2 * 3
        assert numbers(scores) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("in_key", [True, False])
def test_a_head_whose_inputs_are_not_finite_has_nan_and_the_others_their_numbers(value: float, *, in_key: bool) -> None:
    query, key = drawn(1, 4, 8, 4), drawn(1, 2, 8, 4, seed=1)
    before = [numbers(Scores(query, key, True, 0.5), head) for head in range(4)]
    (key if in_key else query)[0, 1, 7, 2] = value
    after = [numbers(Scores(query, key, True, 0.5), head) for head in range(4)]
    spoilt = (2, 3) if in_key else (1,)
    for head in range(4):
        if head in spoilt:
            assert all(math.isnan(after[head][name]) for name in ("max_logit", "entropy", "sink"))
        else:
            assert after[head] == before[head]
    assert math.isnan(numbers(Scores(query, key, True, 0.5))["max_logit"])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scores_that_are_not_finite_are_never_hidden(value: float) -> None:
    logits = drawn(1, 1, 4, 4)
    logits[0, 0, 2, 1] = value
    found = numbers(Logits(logits))
    assert math.isnan(found["entropy"])
    assert math.isnan(found["sink"])
    assert found["max_logit"] == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_a_score_mod_is_applied_block_by_block(monkeypatch: pytest.MonkeyPatch, key_heads: int) -> None:
    monkeypatch.setattr(attention, "BLOCK", 12)
    monkeypatch.setattr(attention, "KEYS", 3)
    query, key, slopes, packed = drawn(2, 4, 9, 8), drawn(2, key_heads, 9, 8, seed=1), drawn(4, seed=2), torch.arange(9) // 4

    def score(scores: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor, slopes: Tensor) -> Tensor:
        return scores + slopes[head] * (query - key) + row

    def seen(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (packed[query] == packed[key])

    places = torch.arange(9)
    biased = defined(query, key) + slopes.double().view(4, 1, 1) * (places[:, None] - places) + torch.arange(2).view(2, 1, 1, 1)
    expected = biased.masked_fill(~(causal_of(9) & (packed[:, None] == packed)), -math.inf)
    scores = Scores(query, key, False, 8**-0.5, None, None, Modification(score, seen, (slopes,)))
    assert numbers(scores) == pytest.approx(head_numbers(expected), rel=1e-5)


class Attention(nn.Module):
    """``attend`` is given q, k, v of shape (b, h, s, d)."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], heads: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.attend, self.num_heads = nn.Linear(8, 24), attend, heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return x + self.attend(q, k, v).transpose(1, 2).reshape(x.shape)

    def split(self, x: Tensor) -> Tensor:
        return self.qkv(x).view(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)

    def scores(self, x: Tensor) -> Tensor:
        """By definition, causal."""
        with torch.no_grad():
            q, k, _ = self.split(x)
        return defined(q, k, seen=causal_of(x.shape[1]))


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return SDPA(q, k, v, is_causal=True)


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    seen = create_block_mask(lambda _b, _h, i, j: i >= j, None, None, q.shape[2], q.shape[2], device="cpu")
    attended: Tensor = flex_attention(q.detach(), k.detach(), v.detach(), block_mask=seen)  # no backward on a host
    return attended + v


def rows(output: Output, model: nn.Module, xs: list[Tensor], *kinds: str, **config: Any) -> dict[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    targets = {kind: [""] for kind in (*kinds, "attention_head_hook")}
    with attached(output, model, optimizer, len(xs), **FORMAT, **{"l2_targets": targets, "sa_batch_rows": 0, **config}):
        for x in xs:
            model(x).sum().backward()
        optimizer.step()
    return {(row.name, row.micro_step): row.values for row in output.rows("attention_head_hook")}


def approximately(scores: Tensor, micro_step: int | None = 0, **how: float) -> dict[Any, Any]:
    found = rows_of_heads(scores, "", **how)
    return {(name, micro_step): pytest.approx(one, rel=1e-5, abs=1e-7) for name, one in found.items()}


@pytest.mark.parametrize("attend", [causal, flex], ids=["sdpa", "flex"])
def test_a_module_has_a_row_for_all_heads_and_one_for_each(output: Output, attend: Any) -> None:
    model, x = Attention(attend), 9 * drawn(3, 6, 8)
    assert rows(output, model, [x], sa_logit_bound=3.0) == approximately(model.scores(x), bound=3.0)


def test_heads_are_counted_before_training_begins(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    rows(output, Attention(causal), [drawn(3, 6, 8)])
    (said,) = [one.getMessage() for one in caplog.records if "each collected step" in one.getMessage()]
    assert "3 rows of 3 series" in said


def test_the_sample_has_rows_of_the_batch_and_all_heads(output: Output) -> None:
    model, x = Attention(causal), drawn(3, 6, 8)
    assert rows(output, model, [x], sa_batch_rows=2, sa_heads=1) == approximately(model.scores(x)[:2])


def test_products_of_three_dimensions_are_followed_to_the_softmax(output: Output) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (one.flatten(0, 1) for one in (q, k))
        scores = torch.baddbmm(torch.zeros(1), q, k.mT, beta=0.0, alpha=0.5).view(*v.shape[:3], -1)
        return torch.softmax(scores.masked_fill(~causal_of(v.shape[2]), -1e9), -1) @ v

    model, x = Attention(attend), drawn(3, 6, 8)
    assert rows(output, model, [x]) == approximately(model.scores(x))


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (
            lambda q, k, v: torch.cat([torch.ones(3, 2, 6, 1), q @ k.mT], -1).softmax(-1)[..., 1:] @ v,
            "no softmax over the product",
        ),
        (lambda q, k, v: (q @ k.mT).sigmoid() @ v, "no softmax over the product"),
        (lambda q, k, v: q + k + v, "no Q and K were found"),
    ],
)
def test_attention_of_another_sort_has_no_row_and_says_so(
    output: Output, caplog: pytest.LogCaptureFixture, attend: Any, reason: str
) -> None:
    assert rows(output, Attention(attend), [drawn(3, 6, 8)], "attention_hook") == {}
    assert output.rows("attention_hook") == []
    (said,) = warnings_in(caplog)
    for kind in ("attention_hook", "attention_head_hook"):
        assert f"{kind}: {reason}" in said


def test_two_hooks_of_a_module_compute_its_scores_once(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    block = Scores.block
    monkeypatch.setattr(Scores, "block", lambda self, *where: (calls.append(1), block(self, *where))[1])
    model, x = Attention(causal), drawn(3, 6, 8)
    assert rows(output, model, [x], "attention_hook", sa_batch_rows=1) == approximately(model.scores(x)[:1])
    assert len(calls) == 1
    (row,) = output.rows("attention_hook")  # of the first head alone, as ``sa_heads`` says
    assert row.values["entropy"] == pytest.approx(head_numbers(model.scores(x)[:1, :1])["entropy"], rel=1e-6)


def test_micro_steps_and_calls_combine_to_the_numbers_of_all_their_queries(output: Output) -> None:
    model, xs = Attention(causal), [drawn(2, length, 8, seed=length) * length for length in (4, 7)]
    each = [model.scores(x) for x in xs]
    bound = max(one[:, 0].max().item() for one in each) * 0.99
    found = rows(output, model, xs, micro_steps="combined", sa_logit_bound=bound)
    for head in range(2):
        parts = [head_numbers(one[:, head : head + 1], bound=bound) for one in each]
        assert found[f".heads.{head}", None] == {
            "max_logit": pytest.approx(max(one["max_logit"] for one in parts), rel=1e-5),
            "heads_above": sum(one["heads_above"] for one in parts) / 2,
            "entropy": pytest.approx((4 * parts[0]["entropy"] + 7 * parts[1]["entropy"]) / 11, rel=1e-5),
            "sink": pytest.approx((3 * parts[0]["sink"] + 6 * parts[1]["sink"]) / 9, rel=1e-5),
        }
    assert len(found) == 3


def test_the_second_call_of_a_module_has_rows_of_its_own(output: Output) -> None:
    inner, x = Attention(causal), drawn(2, 4, 8)
    model = nn.Sequential(inner, inner)
    found = rows(output, model, [x], l2_targets={"attention_head_hook": ["0"]})
    expected = rows_of_heads(inner.scores(inner(x)), "0")
    assert [name for name, _ in found] == ["0.heads", "0.heads.0", "0.heads.1", "0.heads#1", "0.heads.0#1", "0.heads.1#1"]
    for name, one in expected.items():
        assert found[f"{name}#1", 0] == pytest.approx(one, rel=1e-5)


def test_factors_are_rounded_as_autocast_rounds_them(output: Output) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return SDPA(q, k, v, is_causal=True).float()

    model, x = Attention(attend), 9 * drawn(2, 5, 8)
    with torch.no_grad():
        q, k, _ = (one.bfloat16() for one in model.split(x))
    assert rows(output, model, [x]) == approximately(defined(q, k, seen=causal_of(5)))


def test_compiled_attention_has_no_rows_and_says_so(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Attention(causal))
    model[0].compile(backend="eager")
    assert rows(output, model, [drawn(2, 4, 8)], l2_targets={"attention_head_hook": ["0"]}) == {}
    assert "attention_head_hook: " in warnings_in(caplog)[-1]


def of_a_rank(rank: int) -> Tensor:
    return drawn(2, 4 + rank, 8, seed=rank)


def trained(output: Output) -> None:
    rank = torch.distributed.get_rank()
    wrapped = nn.parallel.DistributedDataParallel(Attention(causal))
    rows(output, wrapped, [of_a_rank(rank)], format="parquet")


def test_heads_of_two_ranks_stay_apart_in_a_merge(tmp_path: Any) -> None:
    """Under tensor parallelism they are other heads; under data parallelism, of other samples."""
    on_two_ranks(trained, tmp_path)
    for rank in (0, 1):
        for directory in (tmp_path / f"out{rank}").iterdir():
            directory.rename(tmp_path / directory.name)
    merge(Wanted(tmp_path, tmp_path / "merged"))
    (file,) = (tmp_path / "merged" / "global").glob("attention_head_hook_*.parquet")
    found = {(one["name"], one["ranks"]): one for one in read_merged(file).to_pylist()}
    assert len(found) == 2 * 3
    for rank in (0, 1):
        for name, expected in rows_of_heads(Attention(causal).scores(of_a_rank(rank)), "").items():
            row = found[name, str(rank)]
            assert {column: row[column] for column in expected} == pytest.approx(expected, rel=1e-5)
