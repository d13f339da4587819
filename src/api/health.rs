//! The health of a GPU, as a value.

use crate::values::values;
use berth_kernel::hardware::health;

values! {
    /// Whether a GPU works.
    HealthState from health::HealthState {
        /// It works.
        Healthy = "healthy",
        /// It has a fault, and is still granted.
        Degraded = "degraded",
        /// Nothing new is granted on it.
        Unhealthy = "unhealthy",
        /// It is not there any more.
        Vanished = "vanished",
    }
}
