"""What a run leaves behind for people: metrics, loggers, pictures, artifacts and the report.

metrics.py    numbers of one step: spreads, meters, timers, memory
tracker.py    hands them to every logger
loggers/      one logger per file: JSON lines (always), console, TensorBoard, Weights & Biases
artifacts.py  pictures and trajectories of rollouts and evaluations
pictures.py   contact sheets
video.py      files of videos, and stills that stand for them
report.py     the page that sums a run up
"""
