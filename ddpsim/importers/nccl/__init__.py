"""Logs of nccl-tests: text and JSON, with their list of devices."""
