//! Every command against the ledger: an entry to apply, or a refusal. Pure.
