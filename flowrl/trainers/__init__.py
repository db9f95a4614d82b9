"""Trainer modes: schedules over the same stages."""
