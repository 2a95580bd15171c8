"""A run that is started again by itself when it dies: policy, causes, reports and the process that supervises."""
