"""Made measurements, rounds, records and testbeds."""
