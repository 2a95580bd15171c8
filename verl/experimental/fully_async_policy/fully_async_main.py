"""`python -m verl.experimental.fully_async_policy.fully_async_main key=value …`: with `trainer.mode=async`."""

from verl.trainer.asynchronous import train_with_mode

if __name__ == "__main__":
    train_with_mode("async")
