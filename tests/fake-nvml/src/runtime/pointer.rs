//! Pointers that a C caller hands in. All dereferencing of this crate is here.
//!
//! Each type is a bare pointer on the ABI, and NULL is checked before use. That a pointer which is not NULL leads to
//! memory of the right type and size is the caller's promise, by the documentation of each NVML function; nothing can
//! check it.

use std::ffi::{CStr, c_char, c_uint};

use crate::code::{Answer, Code};

/// Where one value is to be written, and for some calls read first.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T: Copy> Out<T> {
    /// Writes the value; NULL is an invalid argument.
    pub(crate) fn put(self, value: T) -> Answer {
        self.checked()?;
        // SAFETY: not NULL, so it leads to a writable T (see the module comment). `write` drops nothing that stood
        // there.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// The value that the caller left there.
    pub(crate) fn get(self) -> Answer<T> {
        self.checked()?;
        // SAFETY: not NULL, so it leads to a readable T (see the module comment).
        Ok(unsafe { self.0.read() })
    }

    /// NULL is an invalid argument.
    pub(crate) fn checked(self) -> Answer {
        if self.0.is_null() { Err(Code::InvalidArgument) } else { Ok(()) }
    }
}

/// An array to be filled.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct OutArray<T>(*mut T);

impl<T: Copy> OutArray<T> {
    /// Writes all of `values`. The caller guarantees that at least so many fit.
    pub(crate) fn fill(self, values: &[T]) -> Answer {
        for (at, value) in values.iter().enumerate() {
            self.at(at)?.put(*value)?;
        }
        Ok(())
    }

    /// The element at an index that exists, as the caller guarantees.
    pub(crate) fn at(self, index: usize) -> Answer<Out<T>> {
        if self.0.is_null() {
            return Err(Code::InvalidArgument);
        }
        // SAFETY: not NULL, and within the length that the caller gave.
        Ok(Out(unsafe { self.0.add(index) }))
    }

    /// The way in which NVML answers lists: `count` holds the room on entry and the number on return; too little room
    /// answers `INSUFFICIENT_SIZE` with the number needed.
    pub(crate) fn list(self, count: Out<c_uint>, values: &[T]) -> Answer {
        let room = count.get()? as usize;
        count.put(c_uint::try_from(values.len()).map_err(|_| Code::Unknown)?)?;
        if room < values.len() {
            return Err(Code::InsufficientSize);
        }
        self.fill(values)
    }
}

/// A buffer for text.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct OutText(*mut c_char);

impl OutText {
    /// Copies the text and a NUL into the `length` bytes that the caller has; all of it or nothing.
    pub(crate) fn put(self, text: &str, length: c_uint) -> Answer {
        if self.0.is_null() {
            return Err(Code::InvalidArgument);
        }
        if text.len() + 1 > length as usize {
            return Err(Code::InsufficientSize);
        }
        // SAFETY: not NULL, `length` bytes are writable (see the module comment), and text and NUL fit. A Rust string
        // and the caller's buffer do not overlap.
        unsafe {
            self.0.copy_from_nonoverlapping(text.as_ptr().cast(), text.len());
            self.0.add(text.len()).write(0);
        }
        Ok(())
    }

    /// The same, cut to what fits; no room at all is an invalid argument.
    pub(crate) fn put_cut(self, text: &str, length: c_uint) -> Answer {
        if length == 0 {
            return Err(Code::InvalidArgument);
        }
        let mut end = text.len().min(length as usize - 1);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.put(&text[..end], length)
    }
}

/// Text from the caller.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct InText(*const c_char);

impl From<*const c_char> for InText {
    /// A pointer of a structure that the caller handed in.
    fn from(pointer: *const c_char) -> Self {
        Self(pointer)
    }
}

impl InText {
    /// The text; NULL and what is not UTF-8 are invalid arguments.
    pub(crate) fn get(self) -> Answer<String> {
        if self.0.is_null() {
            return Err(Code::InvalidArgument);
        }
        // SAFETY: not NULL, so it leads to a text with a NUL at its end (see the module comment).
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map(str::to_owned).map_err(|_| Code::InvalidArgument)
    }
}

/// Text in a fixed field of a structure: cut to what fits, with a NUL at its end.
pub(crate) fn field<const N: usize>(text: &str) -> [c_char; N] {
    let mut field = [0; N];
    for (to, from) in field.iter_mut().take(N - 1).zip(text.bytes()) {
        *to = from.cast_signed();
    }
    field
}
