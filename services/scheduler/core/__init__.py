"""The scheduler core. Pure: no I/O, clock, randomness, logging, asyncio, protobuf or torch.

The step is three calls and two records: `Scheduler.schedule` makes a `StepPlan`, the worker executes it,
`Scheduler.apply` takes the `StepResult`. Production, simulator and property tests run this very code.
"""
