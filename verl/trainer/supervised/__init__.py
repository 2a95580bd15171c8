"""Training without generation: supervised fine-tuning (`sft`) and reward models (`rm`)."""
