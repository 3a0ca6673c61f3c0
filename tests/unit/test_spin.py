"""The one default of vLLM's that is changed in place: what we change is still what we think it is."""

from __future__ import annotations

import inspect

import pytest

from vllm_kvoffload.platforms.cpu.spin import SPIN_S, shorten_spinning


def test_only_the_time_to_spin_has_a_default_and_ours_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    initialiser = SpinCondition.__init__
    monkeypatch.setattr(initialiser, "__defaults__", initialiser.__defaults__)  # put back afterwards
    parameters = inspect.signature(initialiser).parameters.values()
    (spinning,) = (p for p in parameters if p.default is not inspect.Parameter.empty)
    assert spinning.name == "busy_loop_s"
    shorten_spinning()
    assert inspect.signature(initialiser).parameters["busy_loop_s"].default == SPIN_S
