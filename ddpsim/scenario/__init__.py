"""What was asked: the scenario format `ddpsim/1`, its units, and its errors."""
