//! THE single writer.
