"""Long-context tasks and what answers to them are worth: RULER's, and needles that look alike.

`pariskv eval` is its door. Samples are made once by a tokenizer (`samples`), answered by a model
under some settings or by a server (`server`), kept as they come (`answers`), and summed up
(`record`) with intervals and with agreement, sample by sample, with full attention.
"""
