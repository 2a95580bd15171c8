"""Training on given data: supervised fine-tuning (`sft`) and reward models (`rm`)."""
