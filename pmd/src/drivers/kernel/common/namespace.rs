//! The network namespace of a port.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// The network namespace in which a port was opened. A port whose interface returns opens its sockets there,
/// whichever namespace the control thread is in.
#[derive(Debug)]
pub(crate) struct Namespace(Option<File>);

/// The calling thread is in the namespace of a port until this value is dropped.
#[derive(Debug)]
pub(crate) struct Entered(Option<File>);

impl Namespace {
    /// Returns the namespace of the calling thread. Without `/proc` a port stays in the namespace of its thread.
    pub(crate) fn current() -> Self {
        Self(File::open("/proc/thread-self/ns/net").ok())
    }

    /// Returns the number of the namespace; zero if it is unknown.
    pub(crate) fn inode(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        self.0.as_ref().and_then(|file| file.metadata().ok()).map_or(0, |found| found.ino())
    }

    /// Moves the calling thread into the namespace, which needs `CAP_SYS_ADMIN` unless the thread is there.
    pub(crate) fn enter(&self) -> io::Result<Entered> {
        use std::os::unix::fs::MetadataExt;
        let Self(Some(there)) = self else { return Ok(Entered(None)) };
        let Self(Some(here)) = Self::current() else { return Ok(Entered(None)) };
        if here.metadata()?.ino() == there.metadata()?.ino() {
            return Ok(Entered(None));
        }
        move_into_link_name_space(there.as_fd(), Some(LinkNameSpaceType::Network))?;
        Ok(Entered(Some(here)))
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(back) = self.0.take()
            && let Err(error) = move_into_link_name_space(back.as_fd(), Some(LinkNameSpaceType::Network))
        {
            tracing::error!("the control thread cannot return to its network namespace: {error}");
        }
    }
}
