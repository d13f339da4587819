//! The allocator of one call: it hands out memory from front to back, and all of it is freed with the
//! instance.
//!
//! Every call runs in a fresh instance, so freeing memory during the call gains little, and an
//! allocation costs a few instructions, which matters for the many strings of a node. Only the newest
//! allocation can be freed or can grow in place, as a growing list does. A policy that allocates and
//! frees repeatedly in a long loop should build the SDK with `default-features = false`, which selects
//! Rust's usual allocator.
// An allocator works on addresses.
#![allow(unsafe_code)]

use core::alloc::{GlobalAlloc, Layout};
use core::cell::Cell;
use core::ptr;

/// The unit in which a module's memory grows, bytes.
const PAGE_BYTES: usize = 64 << 10;
/// Minimum growth, pages: 256 KiB, since each growth costs the daemon system calls.
const GROW_PAGES: usize = 4;

unsafe extern "C" {
    /// Set by the linker: the end of the module's static data.
    static __heap_base: u8;
}

/// The allocator that the module describes.
struct AppendOnlyAllocator {
    /// First free address; 0 before the first use.
    next: Cell<usize>,
    /// End of the memory that can be used without growing; 0 before the first use.
    end: Cell<usize>,
}

// SAFETY: a policy has one thread; the daemon refuses modules with shared memory.
unsafe impl Sync for AppendOnlyAllocator {}

#[global_allocator]
static ALLOCATOR: AppendOnlyAllocator = AppendOnlyAllocator { next: Cell::new(0), end: Cell::new(0) };

impl AppendOnlyAllocator {
    /// Grows the memory and allocates. If other code has grown the memory in the meantime, its pages
    /// are skipped.
    #[cold]
    #[inline(never)]
    fn grow(&self, size: usize, align: usize) -> *mut u8 {
        if self.next.get() == 0 {
            self.next.set(&raw const __heap_base as usize);
            self.end.set(core::arch::wasm32::memory_size::<0>() * PAGE_BYTES);
            return self.allocate(size, align);
        }
        let Some(missing) = size.checked_add(align) else {
            return ptr::null_mut();
        };
        let pages = missing.div_ceil(PAGE_BYTES).max(GROW_PAGES);
        let before = core::arch::wasm32::memory_grow::<0>(pages);
        if before == usize::MAX {
            return ptr::null_mut();
        }
        let start = before * PAGE_BYTES;
        if start != self.end.get() {
            self.next.set(start);
        }
        // 128 MiB at most, so it cannot overflow.
        self.end.set(start + pages * PAGE_BYTES);
        self.allocate(size, align)
    }

    #[inline]
    fn allocate(&self, size: usize, align: usize) -> *mut u8 {
        // `next` is below 128 MiB, so adding an alignment cannot overflow; adding a size can.
        let start = self.next.get().wrapping_add(align - 1) & !(align - 1);
        match start.checked_add(size) {
            Some(end) if end <= self.end.get() => {
                self.next.set(end);
                start as *mut u8
            }
            Some(_) => self.grow(size, align),
            None => ptr::null_mut(),
        }
    }
}

// SAFETY: allocations have the requested alignment and never overlap, since `next` is behind every
// allocation that is not freed, and only freeing the newest one moves it back.
unsafe impl GlobalAlloc for AppendOnlyAllocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.allocate(layout.size(), layout.align())
    }

    #[inline]
    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        if old as usize + layout.size() == self.next.get() {
            self.next.set(old as usize);
        }
    }

    #[inline]
    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if old as usize + layout.size() == self.next.get() {
            if let Some(end) = (old as usize).checked_add(size)
                && end <= self.end.get()
            {
                self.next.set(end);
                return old;
            }
        } else if size <= layout.size() {
            return old;
        }
        let new = self.allocate(size, layout.align());
        if !new.is_null() {
            // SAFETY: both allocations have at least this many bytes, and they do not overlap: the old
            // one is still below `next`.
            unsafe { ptr::copy_nonoverlapping(old, new, layout.size().min(size)) };
        }
        new
    }
}
