"""The GSM8K tool tells right from wrong, remembers the best and forgets the trajectory."""

from __future__ import annotations

import pytest

from verl.tools.gsm8k_tool import Gsm8kTool


async def test_the_best_answer_of_a_trajectory_is_its_reward():
    tool = Gsm8kTool({})
    assert tool.name == "calc_gsm8k_reward"
    right, _ = await tool.create(ground_truth="1,072")
    wrong, _ = await tool.create("other", ground_truth="5")
    assert wrong == "other"
    for answer, text in [("7", "7 is wrong."), ("#### 1072", "1072 is right."), ("8", "8 is wrong.")]:
        assert (await tool.execute(right, {"answer": answer}))[0].text == text
    assert await tool.calc_reward(right) == 1.0
    assert await tool.calc_reward(wrong) == 0.0
    await tool.release(right)
    with pytest.raises(KeyError):
        await tool.calc_reward(right)
    with pytest.raises(ValueError, match=r"tools_kwargs.calc_gsm8k_reward.create_kwargs.ground_truth"):
        await tool.create()
