"""What a recipe needs and how fast it would run on GPUs that are not here, from counted FLOPs and bytes."""
