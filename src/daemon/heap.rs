//! The heap after the start: reading the store and compiling policies take a few times what is kept,
//! and the C library gives freed memory back only from the heap's end.
#![allow(unsafe_code, reason = "one call of the C library")]

/// Gives what is free back to the system. Takes a few milliseconds.
pub(super) fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: takes a number and no pointer, and may be called from any thread at any time
    // (malloc_trim(3): MT-Safe).
    unsafe {
        libc::malloc_trim(0);
    }
}
