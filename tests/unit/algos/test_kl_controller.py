"""The KL coefficient: fixed, or steered towards its target."""

import pytest
from omegaconf import OmegaConf

from verl.algos.kl import AdaptiveKLController, FixedKLController, get_kl_controller
from verl.config import KLControllerConfig, as_config


def test_the_fixed_coefficient_never_moves():
    controller = FixedKLController(0.01)
    controller.update(current_kl=99.0, n_steps=1000)
    assert controller.value == 0.01


def test_the_adaptive_coefficient_by_hand():
    controller = AdaptiveKLController(init_kl_coef=0.1, target_kl=0.2, horizon=1000)
    controller.update(current_kl=0.22, n_steps=100)
    # error 0.22 / 0.2 - 1 = 0.1; 0.1 · (1 + 0.1 · 100 / 1000)
    assert controller.value == pytest.approx(0.1 * 1.01)
    controller.update(current_kl=2.0, n_steps=100)
    # an error of 9 counts as 0.2
    assert controller.value == pytest.approx(0.1 * 1.01 * 1.02)
    controller.update(current_kl=0.0, n_steps=100)
    assert controller.value == pytest.approx(0.1 * 1.01 * 1.02 * 0.98)


@pytest.mark.parametrize("wrap", [dict, OmegaConf.create, lambda c: as_config(KLControllerConfig, c)])
def test_the_configuration_chooses(wrap):
    assert isinstance(get_kl_controller(wrap({"type": "fixed", "kl_coef": 0.5})), FixedKLController)
    adaptive = get_kl_controller(wrap({"type": "adaptive", "kl_coef": 0.5, "target_kl": 0.3, "horizon": 50}))
    assert isinstance(adaptive, AdaptiveKLController)
    assert (adaptive.value, adaptive.target, adaptive.horizon) == (0.5, 0.3, 50)


def test_a_target_of_zero_is_refused():
    with pytest.raises(ValueError, match=r"target_kl=0"):
        AdaptiveKLController(0.1, 0, 10)
