"""Tenants take turns by the prefill time that they are served; nobody's flood delays the others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headstart.core.request import Request
from headstart.core.waiting_queue import WaitingQueue
from tests.core.harness import Driver, make_core, make_spec, prompt


def waiting(name: str, tenant: str, seconds: float) -> Request:
    request = Request(make_spec(name, [1], tenant=tenant), 5)
    request.prefill_seconds = seconds
    return request


def serve(queue: WaitingQueue) -> Request:
    request = queue.peek()
    assert request is not None
    assert queue.peek() is request, "looking changes nothing"
    queue.charge(request)
    queue.remove(request)
    queue.check_invariants()
    return request


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.01, 0.05, 0.3, 2.0]), st.floats(0, 9)), min_size=1
    )
)
def test_as_long_as_all_wait_they_are_served_alike(members: list[tuple[str, float, float]]) -> None:
    """At any time two tenants differ by at most a quantum and one of each one's longest requests."""
    queue = WaitingQueue()
    left: dict[str, int] = {}
    for index, (tenant, seconds, key) in enumerate(members):
        queue.push(waiting(f"r{index}", tenant, seconds), key)
        left[tenant] = left.get(tenant, 0) + 1
    longest = {tenant: max(each[1] for each in members if each[0] == tenant) for tenant in left}
    served = dict.fromkeys(left, 0.0)
    last_key: dict[str, float] = {}
    while all(left.values()):
        request = serve(queue)
        tenant = request.spec.tenant
        served[tenant] += request.prefill_seconds
        left[tenant] -= 1
        assert request.key >= last_key.get(tenant, 0.0), "within a tenant the policy's order holds"
        last_key[tenant] = request.key
        assert max(served.values()) - min(served.values()) <= 0.1 + 2 * max(longest.values()) + 1e-3


def test_who_costs_nothing_passes_the_turn_on_too() -> None:
    queue = WaitingQueue()
    for index in range(4):
        queue.push(waiting(f"a{index}", "a", 0.0), 0)
    queue.push(waiting("b", "b", 0.0), 9)
    assert "b" in [serve(queue).request_id for _ in range(2)]


def test_a_lone_tenant_pays_nothing() -> None:
    queue = WaitingQueue()
    for index in range(100):
        queue.push(waiting(f"a{index}", "a", 1.0), 0)
        serve(queue)
    queue.push(waiting("a", "a", 1.0), 0)
    queue.push(waiting("b", "b", 1.0), 1)
    assert serve(queue).request_id == "a", "what it was served before others came is not held against it"


def test_a_flood_of_one_tenant_does_not_delay_the_other() -> None:
    driver = Driver.of(make_core(num_blocks=512, chunk=32, mixed=32, max_num_seqs=2, policy="fcfs"))
    for index in range(30):
        driver.add(make_spec(f"flood {index}", prompt(20, index), tenant="flood", max_tokens=1))
    driver.step()
    driver.add(make_spec("other", prompt(20, 40), tenant="other", max_tokens=1, arrival=driver.now))
    driver.drain()
    order = [chunk.request_id for step in driver.steps for chunk in step.chunks if chunk.samples]
    assert order.index("other") <= 8


def test_the_line_ahead_counts_other_tenants_by_their_share() -> None:
    queue = WaitingQueue()
    for index in range(4):
        queue.push(waiting(f"a{index}", "a", 1.0), index)
    for index in range(10):
        queue.push(waiting(f"b{index}", "b", 0.5), 0)
    assert queue.ahead_of("a", 1.5, 0.5) == (2 + 5, 2.0 + 2.5)
    assert queue.ahead_of("c", 0.0, 100.0) == (14, 9.0)
    assert queue.behind("c", 0.0) == []
    assert [request.request_id for request in queue.behind("a", 1.5)] == ["a2", "a3"]
