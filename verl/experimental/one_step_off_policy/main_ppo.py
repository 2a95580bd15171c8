"""`python -m verl.experimental.one_step_off_policy.main_ppo key=value …`: with `trainer.mode=one_step_off`."""

from verl.trainer.asynchronous import train_with_mode

if __name__ == "__main__":
    train_with_mode("one_step_off")
