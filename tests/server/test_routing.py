"""What the router promises, for any order of calls."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tinsmith.server import routing
from tinsmith.server.routing import BLOCK_TOKENS, MAX_COMPARED_BLOCKS, Candidate, Router, most_load, pick, prefix_keys

REPLICAS = tuple(f"replica-{number}" for number in range(5))
MAX_KNOWN = 12


def prompt(*blocks: int, rest: int = 0) -> list[int]:
    """A whole piece for each number, then some tokens that fill none."""
    return [token for block in blocks for token in [block] * BLOCK_TOKENS] + [7] * rest


prompts = st.builds(
    lambda blocks, rest: prompt(*blocks, rest=rest), st.lists(st.integers(0, 2), max_size=8), st.integers(0, 63)
)


class Calls(RuleBasedStateMachine):
    """Replicas and requests come and go; beside the router, a plain account of where everything is."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.twin = (Router(max_known_blocks=MAX_KNOWN) for _ in range(2))
        self.living: set[str] = set()
        self.underway: dict[str, tuple[str, int]] = {}
        self.number = 0

    def loads(self) -> Counter[str]:
        loads = Counter(dict.fromkeys(self.living, 0))
        for replica, samples in self.underway.values():
            loads[replica] += samples
        return loads

    @initialize()
    def first(self) -> None:
        self.came(REPLICAS[0])

    @rule(replica=st.sampled_from(REPLICAS))
    def came(self, replica: str) -> None:
        self.router.came(replica)
        self.twin.came(replica)
        self.living.add(replica)

    @rule(replica=st.sampled_from(REPLICAS))
    def gone(self, replica: str) -> None:
        lost = self.router.gone(replica)
        assert lost == self.twin.gone(replica) == [key for key, (where, _) in self.underway.items() if where == replica]
        self.living.discard(replica)
        for key in lost:
            del self.underway[key]

    @rule(
        owner=st.sampled_from("ab"),
        adapter=st.sampled_from([None, "x", "y"]),
        tokens=prompts,
        samples=st.integers(1, 40),
    )
    def choose(self, owner: str, adapter: str | None, tokens: list[int], samples: int) -> None:
        self.number += 1
        self._choose(f"request-{self.number}", owner, adapter, tokens, samples)

    @precondition(lambda self: self.underway)
    @rule(data=st.data(), tokens=prompts)
    def choose_again(self, data: st.DataObject, tokens: list[int]) -> None:
        self._choose(data.draw(st.sampled_from(sorted(self.underway))), "a", None, tokens, 1)

    def _choose(self, key: str, owner: str, adapter: str | None, tokens: list[int], samples: int) -> None:
        self.underway.pop(key, None)
        chosen = self.router.choose(key, owner, adapter, tokens, samples)
        assert chosen == self.twin.choose(key, owner, adapter, tokens, samples), "the same calls, another choice"
        if not self.living:
            assert chosen is None
            return
        assert chosen in self.living
        before = self.loads()
        assert before[chosen] <= most_load(min(before.values()), 2)
        self.underway[key] = chosen, samples

    @precondition(lambda self: self.underway and self.living)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        key, replica = (data.draw(st.sampled_from(sorted(some))) for some in (self.underway, self.living))
        for router in (self.router, self.twin):
            router.move(key, replica)
        self.underway[key] = replica, self.underway.pop(key)[1]

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """Nobody who gives away has less than the newcomer afterwards, and that is not more than its part."""
        replica = data.draw(st.sampled_from(sorted(self.living)))
        before = self.loads()
        for key in self.router.part_of(replica, sorted(self.underway)):
            giver = self.underway[key][0]
            for router in (self.router, self.twin):
                router.move(key, replica)
            self.underway[key] = replica, self.underway.pop(key)[1]
            assert self.loads()[giver] >= sum(before.values()) // len(before) >= self.loads()[replica]

    @precondition(lambda self: self.underway)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.underway)))
        for router in (self.router, self.twin):
            router.done(key)
            router.done(key)  # a lost replica that answers after all
        del self.underway[key]

    @invariant()
    def loads_are_those_of_what_is_underway(self) -> None:
        assert self.router.loads == dict(self.loads())

    @invariant()
    def who_holds_an_adapter_is_who_knows_its_key(self) -> None:
        """Only those are compared; a replica that was left out would lose its samples."""
        roots = {prefix_keys(owner, adapter, ())[0] for owner in "ab" for adapter in (None, "x", "y")}
        known = self.router._known.items()
        assert {root: set(holders) for root, holders in self.router._holders.items()} == {
            root: holders for root in roots if (holders := {name for name, keys in known if root in keys})
        }

    @invariant()
    def memory_is_bounded(self) -> None:
        assert self.router.num_known_blocks <= MAX_KNOWN * len(self.living)


TestCalls = Calls.TestCase
TestCalls.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


candidates = st.lists(
    st.builds(Candidate, st.uuids().map(str), st.integers(0, 5), st.integers(0, 200)),
    min_size=1,
    unique_by=lambda each: each.replica,
)


@given(candidates)
def test_nobody_who_may_be_chosen_holds_more_or_holds_as_much_and_has_less_to_do(several: list[Candidate]) -> None:
    chosen = next(each for each in several if each.replica == pick(several))
    least = min(each.load for each in several)
    assert chosen.load <= most_load(least, chosen.held)
    for other in several:
        if other.load <= most_load(least, other.held):
            assert (other.held, -other.load) <= (chosen.held, -chosen.load)


@given(st.lists(prompts, max_size=30), prompts)
def test_what_is_known_of_a_prompt_has_no_holes(earlier: list[list[int]], asked: list[int]) -> None:
    """Halving relies on it; the obvious walk along the keys must find the same."""
    router = Router(max_known_blocks=MAX_KNOWN)
    router.came("only")
    for number, tokens in enumerate(earlier):
        router.choose(f"{number}", "a", None, tokens)
    known = router._known["only"]
    keys = prefix_keys("a", None, asked)
    walked = 0
    while walked < len(keys) and keys[walked] in known:
        walked += 1
    assert routing._num_held(keys, known) == walked
    assert not any(key in known for key in keys[walked:])


def started(count: int = 3) -> Router:
    router = Router()
    for replica in REPLICAS[:count]:
        router.came(replica)
    return router


def test_the_longest_known_prefix_wins_over_a_smaller_load() -> None:
    router = started()
    short = router.choose("1", "a", "x", prompt(1, 2))
    router.choose("2", "a", "y", prompt(9))
    longer = router.choose("3", "b", "x", prompt(1, 2, 3, 4))
    assert len({short, longer}) == 2
    router.choose("4", "a", "x", prompt(1, 2, 3), samples=8)
    assert router.choose("5", "a", "x", prompt(1, 2, 3, 5)) == short
    assert router.choose("6", "b", "x", prompt(1, 2, 3, 5)) == longer


@pytest.mark.parametrize(("owner", "adapter"), [("b", "x"), ("a", "y"), ("a", None)])
def test_a_prefix_of_another_owner_or_adapter_counts_for_nothing(owner: str, adapter: str | None) -> None:
    router = started()
    first = router.choose("1", "a", "x", prompt(1, 2, 3))
    assert router.choose("2", owner, adapter, prompt(1, 2, 3)) != first


def test_a_replica_that_has_the_adapter_is_preferred_even_without_a_common_prefix() -> None:
    router = started()
    first = router.choose("1", "a", "x", prompt(1))
    assert router.choose("2", "a", "x", [5, 5, 5]) == first


def test_a_few_prompts_that_share_an_adapter_alone_are_spread_over_all_replicas() -> None:
    router = started(2)
    for number in range(16):
        router.choose(f"{number}", "a", "x", [number] * 9)
    assert [*router.loads.values()] == [8, 8]


def test_a_hot_prefix_spreads_over_all_replicas() -> None:
    router = started(5)
    for number in range(600):
        router.choose(f"{number}", "a", "x", prompt(1, 2, 3, number))
    loads = router.loads.values()
    assert max(loads) - min(loads) <= max(routing.SLACK_SAMPLES, routing.SLACK_SHARE * min(loads)) + 1
    assert min(loads) > 0


def test_without_anything_in_common_the_least_busy_is_chosen() -> None:
    router = started()
    for number in range(300):
        router.choose(f"{number}", f"owner-{number}", "x", prompt(number))
    assert set(router.loads.values()) == {100}


def test_a_replica_that_comes_back_holds_nothing() -> None:
    router = started(2)
    first = router.choose("1", "a", "x", prompt(1, 2, 3), samples=4)
    assert first is not None
    assert router.gone(first) == ["1"]
    elsewhere = router.choose("1", "a", "x", prompt(1, 2, 3), samples=4)
    assert elsewhere not in (None, first)
    router.came(first)
    assert router.choose("2", "a", "x", prompt(1, 2, 3)) == elsewhere


def test_without_replicas_there_is_no_choice_and_nothing_underway() -> None:
    router = Router()
    assert router.choose("1", "a", None, prompt(1)) is None
    router.came("late")
    assert dict(router.loads) == {"late": 0}
    assert router.choose("1", "a", None, prompt(1)) == "late"


def test_a_prompt_of_any_length_has_a_bounded_number_of_keys() -> None:
    assert len(prefix_keys("a", None, prompt(*range(3), rest=9))) == 4
    assert len(prefix_keys("a", None, [1] * 10**6)) == 1 + MAX_COMPARED_BLOCKS


@given(prompts, prompts)
def test_keys_are_alike_exactly_as_far_as_prompts_are(one: list[int], other: list[int]) -> None:
    alike = 0
    while alike < min(len(one), len(other)) and one[alike] == other[alike]:
        alike += 1
    pairs = zip(prefix_keys("a", "x", one), prefix_keys("a", "x", other), strict=False)
    same = [mine == theirs for mine, theirs in pairs]
    assert same == [BLOCK_TOKENS * index <= alike for index in range(len(same))]
