"""The schema's history, run by `online_sao.store.migrate`; part of the wheel."""
