//! Attaching to a port, by the driver that its server reports.

use std::path::Path;

use wirepath_control_socket::connect;

use super::client::{AttachOffer, AttachedPort, REPLY_TIMEOUT, invalid, map_timeout, receive, send};
use super::message::{AttachError, AttachRequest, Reply, Request};
use crate::drivers::nic::{mana, mlx5};
use crate::port::PortId;

impl AttachedPort {
    /// Attaches to the port that a server offers on `socket`. The returned queues and buffers are ready for
    /// use. `port` is the port number that their packets carry.
    ///
    /// # Errors
    /// No server listens on the socket, or it refuses the request. The received memory cannot be mapped, or
    /// the description contradicts what the kernel reports of the device.
    pub fn attach(socket: &Path, wanted: &AttachRequest, port: PortId) -> Result<Self, AttachError> {
        let socket = connect(socket, REPLY_TIMEOUT).map_err(map_timeout)?;
        send(&socket, &Request::Attach(*wanted))?;
        let offer = match receive(&socket)? {
            (Reply::Attached(description), files) => {
                AttachOffer { socket, description: *description, files, wanted: *wanted, port }
            }
            (Reply::Refused(why), _) => return Err(AttachError::Refused(why)),
            _ => return Err(AttachError::Message("the reply does not match the request".to_owned())),
        };
        match offer.description.status.driver.as_str() {
            mana::NAME => mana::accept(offer),
            mlx5::NAME => mlx5::accept(offer),
            other => Err(invalid(format!("driver \"{other}\" cannot share queues"))),
        }
    }
}
