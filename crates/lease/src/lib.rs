//! The exclusive right to run a source's engine. A lease gives liveness; safety comes from the epoch in the platform
//! database (R-LEASE-2), so a wrong belief about the lease costs an error and never a wrong write.
