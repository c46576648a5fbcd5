"""The collect job, without Prefect."""
