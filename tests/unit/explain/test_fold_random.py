"""Random clusters: the fold, which searches few nodes, gives the answers of a search of each."""

from dataclasses import replace
from random import Random

import pytest

from drakit_explain.allocation import Outcome
from drakit_explain.availability import analyze, budget_of
from drakit_explain.cel.library import Library
from drakit_explain.devices import Amount, CapacityFacts, CounterSetFacts, TaintFacts
from drakit_explain.fold import judge
from drakit_explain.model import ClassFacts, Constraint, DeviceID, Share, Toleration
from drakit_explain.pending import Explainer
from drakit_explain.pending_claims import Wanted
from drakit_explain.trial import Trial
from tests.fakes.world import (
    POD,
    claim,
    device,
    evaluate_for,
    holding,
    node,
    request,
    slice_on,
    world_of,
)

CARDS = [CounterSetFacts(name="card", counters=(Amount("m", amount),)) for amount in "123"]
TAINT = TaintFacts(key="no", effect="NoSchedule")
MEMORY = CapacityFacts(name="m", value="2")
SELECTORS = ('device.attributes["d"].model == "x"', '"model" in device.attributes["d"]')


def a_device(random, name, *, parts):
    attributes = {"numa": random.randrange(3)} if random.random() < 0.8 else {}
    if random.random() < 0.7:
        attributes["model"] = random.choice("xy")
    shareable = not parts and random.random() < 0.2
    return device(
        name,
        attributes=attributes,
        capacity=[MEMORY] if shareable or random.random() < 0.2 else [],
        shareable=shareable,
        taints=(TAINT,) if random.random() < 0.15 else (),
        consumes=(random.choice(CARDS[:2]),) if parts and random.random() < 0.8 else (),
    )


def slices_of(random, name):
    """The pool of a node: sometimes with counters, incomplete or invalid."""
    parts = random.random() < 0.3
    devices = [a_device(random, f"g{n}", parts=parts) for n in range(random.randrange(2))]
    if random.random() < 0.05 and devices:
        devices.append(devices[0])
    number = 1 + parts + (random.random() < 0.05)
    yield replace(slice_on(name, *devices), pool_slices=number)
    if parts:
        card = random.choice(CARDS)
        yield replace(slice_on(name), name=f"c-{name}", pool_slices=number, counter_sets=(card,))


def holders(random, of):
    name = of.pool
    for number, each in enumerate(of.devices):
        if each.kind.shareable:
            if random.random() < 0.5:
                continue
            share = Share(device=DeviceID("d", name, f"g{number}"), consumed=(Amount("m", "1"),))
            held = holding(f"s-{name}-{number}", pool=name)
            yield replace(held, devices=(), shares=(share,))
        elif random.random() < 0.15:
            yield holding(f"h-{name}-{number}", f"g{number}", pool=name)


def requests(random):
    for name in "ab"[: random.randint(1, 2)]:
        exact = [
            request(
                f"{name}{number}",
                count=random.choice((0, 1, 1, 2)),
                selectors=(random.choice(SELECTORS),) if random.random() < 0.4 else (),
                tolerations=(Toleration(operator="Exists"),) if random.random() < 0.3 else (),
                admin_access=random.random() < 0.05,
                capacity=(Amount("m", "1"),) if random.random() < 0.15 else (),
            )
            for number in range(2)
        ]
        listed = random.random() < 0.25
        yield request(name, device_class="", alternatives=tuple(exact)) if listed else exact[0]


def trial_of(seed):
    random = Random(seed)
    wanted = tuple(requests(random))
    kinds = [Constraint(attribute="d/numa", distinct=each) for each in (False, True)]
    constraints = tuple(each for each in kinds if random.random() < 0.25)
    nodes = [f"n{number}" for number in range(6)]
    facts = [fact for name in nodes for fact in slices_of(random, name)]
    held = [fact for each in facts for fact in holders(random, each)]
    waiting = claim(*wanted, constraints=constraints)
    world = world_of(ClassFacts(name="any", uid="c"), *map(node, nodes), *facts, *held, waiting)
    world.minor = random.choice((34, 35, 36, 37))
    evaluate_for(Explainer(world), world, POD, Library())
    return Trial(
        world=world,
        wanted=[Wanted(origin="c", requests=wanted, constraints=constraints)],
        nodes=dict.fromkeys(world.views()),
        budget=budget_of(world),
        analyze=lambda each, budget: analyze(each, world, budget),
    )


@pytest.mark.parametrize("part", range(2))
def test_the_fold_agrees_with_a_search_of_each_node(part):
    seen = set()
    shared = 0
    for seed in range(part * 150, (part + 1) * 150):
        trial = trial_of(seed)
        judged = judge(trial, reached=lambda name: True)
        expected = {name: trial.allocate(name) for name in trial.nodes}
        fatal = [name for name, answer in expected.items() if answer.fatal]
        fits = [name for name, answer in expected.items() if answer.outcome is Outcome.FITS]
        assert list(judged.fatal) == fatal, seed
        assert judged.fits_on == (fits[0] if fits else ""), seed
        for name, answer in judged.answers.items():
            assert (answer.outcome, answer.kind, answer.chance) == (
                expected[name].outcome,
                expected[name].kind,
                expected[name].chance,
            ), (seed, name)
        profiles = {trial.profiles().of(trial.pools(name)) for name in trial.nodes}
        shared += len(profiles) < len(trial.nodes)
        seen |= {(answer.outcome, answer.kind) for answer in expected.values()}
    assert len(seen) >= 7, "the clusters are too much alike"
    assert shared >= 15, "few clusters have nodes with equal profiles"
