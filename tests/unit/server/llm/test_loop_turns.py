"""However many tasks work in slices, one slice is done in a round of the loop."""

from __future__ import annotations

import asyncio

from oarlock.server.llm.loop_turns import turn

NUM_TASKS, NUM_SLICES = 20, 10


def test_one_slice_is_done_in_each_round_and_tasks_take_turns():
    async def scenario():
        order, rounds, most = [], 0, 0

        async def works(name):
            for _ in range(NUM_SLICES):
                await turn()
                order.append((name, rounds))

        tasks = [asyncio.create_task(works(name)) for name in range(NUM_TASKS)]
        tasks[3].cancel()
        while not all(task.done() for task in tasks):
            before = len(order)
            await asyncio.sleep(0)
            rounds += 1
            most = max(most, len(order) - before)
        return order, most

    order, most = asyncio.run(scenario())
    assert most == 1
    names = [name for name in range(NUM_TASKS) if name != 3]
    assert [name for name, _ in order] == names * NUM_SLICES
    assert asyncio.run(scenario())[1] == 1, "a second loop has turns of its own"


def test_tasks_that_are_cancelled_while_they_wait_hold_up_nobody():
    async def scenario():
        waiting = [asyncio.create_task(turn()) for _ in range(5)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.wait_for(turn(), 20)
        await asyncio.wait_for(turn(), 20)

    asyncio.run(scenario())
