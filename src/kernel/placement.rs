//! Which devices sit best together: the baseline that answers when no policy does.
