"""The way from Kopf's thread into the loop."""

import asyncio

from drakit_operator.intake import Intake, Seen
from drakit_operator.kinds import CLASSES, Name


def seen(uid, *, gone=False, name="gpu"):
    body = {"metadata": {"name": name, "uid": uid}, "spec": {}}
    fact = None if gone else CLASSES.project(body, "v1")
    return Seen(kind=CLASSES, name=Name("", name), uid=uid, fact=fact)


async def test_only_an_objects_last_word_waits():
    batches = []
    intake = Intake(asyncio.get_running_loop(), batches.append)

    def kopf():
        for _ in range(1000):
            intake.put(seen("a"))
        intake.put(seen("a", gone=True))

    kopf()  # in this thread, so that the loop cannot take anything in between
    await asyncio.sleep(0)
    assert batches == [[seen("a", gone=True)]]


async def test_words_about_two_uids_of_one_name_keep_their_order():
    batches = []
    intake = Intake(asyncio.get_running_loop(), batches.append)
    intake.put(seen("old"))
    intake.put(seen("new"))
    intake.put(seen("old", gone=True))
    await asyncio.sleep(0)
    assert [each.uid for each in batches[0]] == ["new", "old"]


async def test_another_thread_is_heard_until_the_intake_is_closed():
    batches = []
    intake = Intake(asyncio.get_running_loop(), batches.append)
    await asyncio.to_thread(intake.put, seen("a"))
    await asyncio.sleep(0)
    assert len(batches) == 1
    await asyncio.to_thread(intake.put, seen("b"))
    intake.close()
    await asyncio.to_thread(intake.put, seen("c"))
    await asyncio.sleep(0.01)
    assert [each.uid for batch in batches for each in batch] in (["a"], ["a", "b"])
