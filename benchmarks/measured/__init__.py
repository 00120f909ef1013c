"""What training takes on an emulated mixed cluster: plan, baselines, and the prediction of each."""
