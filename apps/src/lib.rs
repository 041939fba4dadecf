//! The programs: l2fwd, tunnel-gateway and wirepath.
