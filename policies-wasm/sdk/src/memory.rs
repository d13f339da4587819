//! The memory of one call: handed out from front to back, and all of it gone with the instance.
//!
//! Every call runs in a fresh instance, so what is freed in between hardly matters, and handing the
//! many texts of a node over costs a few instructions each. Only the newest piece can be given back
//! or grow where it lies, which is what a growing list does most. A policy that frees and takes
//! again and again in a long loop does better with an allocator of its own: it builds the SDK with
//! `default-features = false`.
// The allocator's contract is made of addresses.
#![allow(unsafe_code)]

use core::alloc::{GlobalAlloc, Layout};
use core::cell::Cell;
use core::ptr;

/// The unit in which a module's memory grows, bytes.
const PAGE_BYTES: usize = 64 << 10;
/// Least growth, pages: 256 KiB, since the daemon asks the system anew at each.
const GROW_PAGES: usize = 4;

unsafe extern "C" {
    /// Set by the linker: where the module's own data ends.
    static __heap_base: u8;
}

/// See the module.
struct Pile {
    /// First free address; 0 before the first use.
    next: Cell<usize>,
    /// End of what the module has; 0 before the first use.
    end: Cell<usize>,
}

// SAFETY: a policy has one thread; the daemon refuses modules with shared memory.
unsafe impl Sync for Pile {}

#[global_allocator]
static PILE: Pile = Pile { next: Cell::new(0), end: Cell::new(0) };

impl Pile {
    /// Makes `end` at least `wanted`. The memory may have been grown by others meanwhile: then what
    /// they took is left out.
    #[cold]
    #[inline(never)]
    fn grow(&self, size: usize, align: usize) -> *mut u8 {
        if self.next.get() == 0 {
            self.next.set(&raw const __heap_base as usize);
            self.end.set(core::arch::wasm32::memory_size::<0>() * PAGE_BYTES);
            return self.take(size, align);
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
        self.take(size, align)
    }

    #[inline]
    fn take(&self, size: usize, align: usize) -> *mut u8 {
        // Below 128 MiB, so that adding an alignment cannot overflow; a size can.
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

// SAFETY: pieces start at the alignment asked for and never overlap, since `next` lies behind every
// piece that is not given back, and only the newest ever moves it back.
unsafe impl GlobalAlloc for Pile {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.take(layout.size(), layout.align())
    }

    #[inline]
    unsafe fn dealloc(&self, piece: *mut u8, layout: Layout) {
        if piece as usize + layout.size() == self.next.get() {
            self.next.set(piece as usize);
        }
    }

    #[inline]
    unsafe fn realloc(&self, piece: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if piece as usize + layout.size() == self.next.get() {
            if let Some(end) = (piece as usize).checked_add(size)
                && end <= self.end.get()
            {
                self.next.set(end);
                return piece;
            }
        } else if size <= layout.size() {
            return piece;
        }
        let moved = self.take(size, layout.align());
        if !moved.is_null() {
            // SAFETY: both are pieces of at least so many bytes, and the new one is not the old one:
            // that still lies below `next`.
            unsafe { ptr::copy_nonoverlapping(piece, moved, layout.size().min(size)) };
        }
        moved
    }
}
