//! The transitions of a core that runs without a daemon.

use berth_core::KernelHandle;
use berth_core::transition_stream::{Batches, TransitionStream};

/// The batches from the present ledger on, for one subscriber, computed on a thread of their own, since some tests have
/// no runtime that goes on by itself.
pub(crate) fn batches(kernel: &KernelHandle) -> Batches {
    let mut stream = TransitionStream::since(kernel.snapshot());
    let (batches, run) = (stream.subscribe(), stream.run(kernel));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    std::thread::spawn(move || runtime.block_on(run));
    batches
}
