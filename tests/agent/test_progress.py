"""Frozen engines by their own counters (C14): names and forms are those that engines print."""

from __future__ import annotations

import pytest

from agent.progress import STALL_S, Progress, numbers

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="tiny"} 4.0
vllm:num_requests_running{engine="1",model_name="tiny"} 0.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 6.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 569.0
vllm:prompt_tokens_total{engine="1",model_name="tiny"} 1.0
vllm:generation_tokens_total{engine="0",model_name="tiny"} 3175.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="tiny"} 7.0
vllm:iteration_tokens_total_count{engine="0",model_name="tiny"} 926.0
"""
LLAMA = """llamacpp:prompt_tokens_total 232
llamacpp:tokens_predicted_total 6205
llamacpp:n_decode_total 2054
llamacpp:requests_processing 4
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (VLLM, {"0": (4, 4 + 569 + 3175 + 926), "1": (0, 1)}),
        (LLAMA, {"": (4, 4 + 232 + 6205 + 2054)}),
        ("vllm:num_requests_running 4\n", {}),
        ("vllm:num_requests_running four\nvllm:prompt_tokens_total 1\n", {}),
        ("<html>\n\0{ }", {}),
        ("", {}),
    ],
)
def test_what_engines_print_is_read(text: str, found: dict[str, tuple[float, float]]) -> None:
    assert numbers(text) == found


def test_C14_one_hanging_copy_of_an_engine_is_seen_beside_one_that_moves() -> None:
    watch = Progress()
    for second in range(int(STALL_S) + 1):
        moving = VLLM.replace('engine="1",model_name="tiny"} 1.0', f'engine="1"}} {second + 5}')
        reason = watch.stalled_because(moving, float(second))
        assert (reason is None) == (second < STALL_S)
    assert reason == "4 requests run and none moved for 40 s"
    assert watch.stalled_because(VLLM.replace(" 926.0", " 927.0"), STALL_S + 1) is None


def test_a_page_without_numbers_forgets_what_was_before() -> None:
    watch = Progress()
    assert watch.stalled_because(LLAMA, 0.0) is None
    assert watch.stalled_because("", 30.0) is None
    assert watch.stalled_because(LLAMA, 60.0) is None
