"""The head's ranks and those of another node, joined by a real link: steps, masks, answers, failures and the end."""

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.unit.workers.nodes.thread_ranks import ThreadRanks, config, linked
from workers.config import WorkerConfig
from workers.distributed.nodes.link import Link
from workers.errors import StartupError, WorkerError
from workers.protocol import StepMetadata, mask_span, pack_step, step_bytes
from workers.worker.greedy_step import SequenceChunk, greedy_step
from workers.worker.multiproc_executor import MultiprocExecutor
from workers.worker.nodes import group_ranks, host_ranks, messages, node_process
from workers.worker.nodes.ending import Ending
from workers.worker.nodes.group_ranks import GroupRanks
from workers.worker.nodes.node_process import NodeProcess


@dataclass
class Group:
    """A head and node 1."""

    head: GroupRanks
    ranks: ThreadRanks
    node: threading.Thread
    link: Link  # the other node's end
    stop_fd: int  # to write to
    left: threading.Event  # whether the head was told that the node leaves
    ending: list[Ending]

    def close(self, failure: Exception | None = None) -> Ending:
        self.head.close(failure)
        self.node.join(60)
        return self.ending[0]


StartGroup = Callable[..., Group]


@pytest.fixture
def start_group(monkeypatch: pytest.MonkeyPatch) -> Generator[StartGroup]:
    ranks = ThreadRanks()
    monkeypatch.setattr(host_ranks, "spawn_ranks", ranks.spawn)
    groups: list[Group] = []

    def start(settings: WorkerConfig | None = None) -> Group:
        settings = settings or config()
        ours, theirs = linked()
        stop_read, stop_write = os.pipe()
        ending: list[Ending] = []
        process = NodeProcess(settings, 1, theirs, [], lambda *_: None, stop_read)

        def run() -> None:
            ending.append(process.run())
            os.close(stop_read)

        node = threading.Thread(target=run, daemon=True)
        node.start()
        left = threading.Event()
        head = GroupRanks(settings, [ours], "127.0.0.1", on_leave=left.set)
        groups.append(Group(head, ranks, node, theirs, stop_write, left, ending))
        return groups[-1]

    yield start
    for group in groups:
        for rank in ranks.ranks.values():
            rank.may_finish.set()
        group.close()
        assert not group.node.is_alive()
        os.close(group.stop_fd)
    for rank in ranks.ranks.values():
        rank.join()


def step_of(step_id: int, num_masks: int = 0) -> StepMetadata:
    step = greedy_step([SequenceChunk([5, 6, 7], 0, range(1, 3))], 16, [2], step_id=step_id)
    if num_masks:
        bits = np.full((num_masks, 4), step_id, np.uint32)
        step = replace(step, mask_rows=np.arange(num_masks, dtype=np.int32), mask_bits=bits)
    return step


def packed(step: StepMetadata) -> bytes:
    buffer = bytearray(step_bytes(step))
    pack_step(step, memoryview(buffer))
    return bytes(buffer)


def test_every_rank_gets_the_bytes_of_a_step_and_the_answer_comes_back(start_group: StartGroup) -> None:
    group = start_group(config(tp=4))
    for step_id in range(1, 10):
        group.head.send_step(step_of(step_id), masks_follow=False)
        answer = group.head.receive_answer(60)
        assert answer is not None and answer.step_id == step_id
        assert group.head.wait_until_finished(60)  # these ranks have no collectives that keep them together
    expected = [packed(step_of(step_id)) for step_id in range(1, 10)]
    assert [group.ranks.ranks[rank].seen for rank in range(4)] == [expected] * 4
    assert group.ranks.places[1].store == group.head._host.store
    ending = group.close()
    assert ending == Ending(0)
    assert [rank.returncode for rank in group.ranks.ranks.values()] == [0] * 4


def test_masks_follow_to_every_rank(start_group: StartGroup) -> None:
    group = start_group()
    step = step_of(1, num_masks=1)
    group.head.send_step(step, masks_follow=True)
    group.head.send_masks(step.mask_bits)
    group.head.send_step(step_of(2), masks_follow=False)
    assert group.head.receive_answer(60) is not None
    assert group.head.receive_answer(60) is not None
    assert group.head.wait_until_finished(60)
    begin, end = mask_span(memoryview(packed(step)))
    for rank in group.ranks.ranks.values():
        np.testing.assert_array_equal(rank.masks[0], step.mask_bits)
        assert rank.seen[0][:begin] == packed(step)[:begin] and rank.seen[0][end:] == packed(step)[end:]


def test_the_answering_rank_may_be_on_another_node(start_group: StartGroup) -> None:
    group = start_group(config(tp=1, pp=2))
    for step_id in (1, 2):
        group.head.send_step(step_of(step_id), masks_follow=False)
    answers = [group.head.receive_answer(60) for _ in (1, 2)]
    assert [answer and answer.step_id for answer in answers] == [1, 2]


def test_an_answer_that_does_not_come_is_none(start_group: StartGroup) -> None:
    group = start_group(config(tp=1, pp=2))
    wait_for(lambda: 1 in group.ranks.ranks)
    group.ranks.ranks[1].may_finish.clear()
    group.head.send_step(step_of(1), masks_follow=False)
    assert group.head.receive_answer(0.1) is None
    assert not group.head.wait_until_finished(0.1)


def test_what_ranks_of_other_nodes_say_while_loading_comes_with_their_numbers(start_group: StartGroup) -> None:
    group = start_group()
    wait_for(lambda: 1 in group.ranks.ranks)
    group.ranks.ranks[1].control.send("progress", fraction=0.5)
    assert group.head.messages(5) == [(1, {"kind": "progress", "fraction": 0.5})]
    group.head.tell_all("allocate", num_blocks=7)
    for rank in (0, 1):
        assert group.ranks.ranks[rank].control.recv() == {"kind": "allocate", "num_blocks": 7}


def test_nothing_is_announced_that_was_taken_already(start_group: StartGroup) -> None:
    """A wake-up without a message would count as a rank that has something to say, and end the group."""
    group = start_group()
    wait_for(lambda: 1 in group.ranks.ranks)
    links, say = group.head._links, group.ranks.ranks[1].control.send
    sender = threading.Thread(target=lambda: [say("progress", fraction=0.5) for _ in range(2000)])
    sender.start()
    taken = 0
    while taken < 2000:
        assert select.select([links], [], [], 60)[0]
        found = len(links.take())
        assert found
        taken += found
    sender.join()


def test_a_lost_rank_of_another_node_is_named_with_its_host(start_group: StartGroup) -> None:
    group = start_group()
    wait_for(lambda: 1 in group.ranks.ranks)
    group.ranks.ranks[1].die()
    with pytest.raises(Exception, match="something to say"):
        group.ranks.ranks[0].may_finish.clear()
        group.head.receive_answer(60)
    error = group.head.failure(3)
    assert error.rank == 1 and error.cause == "killed by signal 9 (on node 1 (other-host, 127.0.0.1))"
    ending = group.close(error)
    assert ending == Ending(5, str(error))


def test_a_rank_that_lost_another_is_not_the_first_cause(start_group: StartGroup) -> None:
    """Rank 0 sees a lost connection before anybody knows that rank 1 was killed."""
    group = start_group()
    wait_for(lambda: 1 in group.ranks.ranks)
    first = group.ranks.ranks[0]
    first.control.send("raised", step_id=7, cause="RuntimeError: [gloo] Connection closed by peer", of_peer=True)
    threading.Timer(0.2, group.ranks.ranks[1].die).start()
    error = group.head.failure(7)
    assert error.rank == 1 and "killed by signal 9" in error.cause


def test_a_failure_that_follows_from_another_is_the_cause_when_nothing_else_is_known(start_group: StartGroup) -> None:
    group = start_group()
    group.ranks.ranks[0].control.send("raised", step_id=7, cause="RuntimeError: gloo", of_peer=True)
    began = time.monotonic()
    error = group.head.failure(9)
    assert error.rank == 0 and error.step_id == 7 and time.monotonic() - began >= 0.9


def test_a_node_that_hangs_up_is_the_first_cause(start_group: StartGroup) -> None:
    group = start_group()
    wait_for(lambda: 1 in group.ranks.ranks)
    group.link.close()
    error = group.head.failure(3)
    assert error.rank == 1 and error.cause == "node 1 (other-host, 127.0.0.1) has hung up"
    group.head.close(error)
    group.node.join(60)
    assert group.ending[0].exit_code == 5


def test_a_silent_node_is_lost(start_group: StartGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    group = start_group()
    wait_for(lambda: 1 in group.ranks.ranks)
    stopped = threading.Event()

    def stop(process: NodeProcess) -> None:
        stopped.set()
        time.sleep(0.01)

    monkeypatch.setattr(NodeProcess, "_turn", stop)
    assert stopped.wait(60)  # from here on the node itself looks at no clock
    monkeypatch.setattr(messages, "SILENCE_S", 0.2)
    monkeypatch.setattr(group_ranks, "_LAST_WORDS_S", 60.0)  # the links may look late at their clocks
    error = group.head.failure(3)
    assert error.cause == "node 1 (other-host, 127.0.0.1) has said nothing for 0.2 s"
    monkeypatch.undo()
    group.node.join(60)
    assert group.ending[0] == Ending(5, "node 0 (head-host, 127.0.0.1) has hung up")


def test_a_node_that_stops_tells_the_head_and_serves_until_it_ends(start_group: StartGroup) -> None:
    group = start_group()
    os.write(group.stop_fd, b"s")
    assert group.left.wait(60)
    group.head.send_step(step_of(1), masks_follow=False)
    assert group.head.receive_answer(60) is not None
    assert group.close() == Ending(0)


def test_the_rank_that_is_behind_is_named_on_whichever_node(start_group: StartGroup) -> None:
    group = start_group(config(tp=4))
    wait_for(lambda: 3 in group.ranks.ranks)
    group.ranks.ranks[3].may_finish.clear()
    group.head.send_step(step_of(1), masks_follow=False)
    assert group.head.receive_answer(60) is not None
    wait_for(lambda: [place.finished for place in group.head.places()] == [1, 1, 1, 0])
    assert group.ranks.ranks[3].signals  # it was asked for its stacks


def test_a_node_that_does_not_say_how_far_it_is_is_behind_all(
    start_group: StartGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_ranks, "_PLACES_S", 0.2)
    group = start_group()
    wait_for(lambda: 1 in group.ranks.ranks)
    stopped = threading.Event()
    monkeypatch.setattr(NodeProcess, "_turn", lambda self: stopped.set() or time.sleep(0.01))  # as if it were stopped
    group.head._links.send(messages.BEAT)  # which ends the turn that has begun
    assert stopped.wait(60)
    assert [place.finished for place in group.head.places()] == [0, -1]
    monkeypatch.undo()


@pytest.mark.parametrize("of_peer", [False, True])
def test_a_start_that_fails_on_one_node_fails_on_all(start_group: StartGroup, of_peer: bool) -> None:
    """With the cause and the fix of the rank that failed first, although another one spoke before."""
    group = start_group()
    wait_for(lambda: 1 in group.ranks.ranks)
    if of_peer:
        group.ranks.ranks[0].control.send("failed", cause="gloo", fix="Look.", exit_code=3, of_peer=True)
        time.sleep(0.1)
    group.ranks.ranks[1].control.send("failed", cause="No memory.", fix="Buy some.", exit_code=4)
    with pytest.raises(StartupError, match=r"No memory. \(on node 1 .*\) Buy some.") as caught:
        MultiprocExecutor(config(), group.head, lambda *_: None)
    assert caught.value.exit_code == 4
    group.node.join(60)
    assert group.ending[0] == Ending(4, caught.value.cause, "Buy some.")


def test_a_node_ends_by_itself_when_the_head_does_not_say_how(
    start_group: StartGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_process, "_END_S", 0.1)
    group = start_group()
    wait_for(lambda: 1 in group.ranks.ranks)
    group.ranks.ranks[1].die()
    group.node.join(60)
    assert group.ending[0].exit_code == 5 and "rank 1" in group.ending[0].cause


def test_nothing_is_left_of_a_group(start_group: StartGroup) -> None:
    before = len(os.listdir("/proc/self/fd"))
    threads = set(threading.enumerate())
    group = start_group()
    wait_for(lambda: 1 in group.ranks.ranks)
    group.close(WorkerError(0, 1, "gone"))
    wait_for(lambda: set(threading.enumerate()) <= threads)
    assert len(os.listdir("/proc/self/fd")) == before + 1  # our end of `stop_fd`


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        with contextlib.suppress(KeyError):
            time.sleep(0.01)
