use std::any::Any;
use std::io::IoSlice;
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::io::{Errno, writev};

use super::device::{Supported, TapQueue};
use crate::drivers::kernel::common::vnet_hdr::{self, VirtioNetHdr};
use crate::drivers::sw_offload;
use crate::port::{TxDriver, bytes_of};
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_packet::superframe;
use wirepath_packet::{Batch, Packet};
use wirepath_wire::checksum::Transport;
use wirepath_wire::{L4Type, Parsed, checksum_offload};

/// Segments in the usual case. A frame of 9216 bytes has five, or six with a separate header.
const SEGMENTS: usize = 16;
/// Segments of most superframes: those of 64 KiB in buffers of 2 KiB.
const SUPERFRAME_SEGMENTS: usize = 48;
/// `virtio_net_hdr` of a complete frame.
const COMPLETE: [u8; vnet_hdr::TUNNEL_HEADER] = [0; vnet_hdr::TUNNEL_HEADER];

/// Sends by writev(2), one frame per call: the kernel has no other interface for a TAP device.
pub(super) struct Sender {
    queue: Arc<TapQueue>,
    /// Length of the longest frame in bytes. The interface itself accepts any length.
    max_frame: usize,
    /// Offloads of the kernel. The virtio header is the longer one if they include UDP tunnels.
    supported: Supported,
    counters: Arc<QueueCounters>,
}

impl Sender {
    pub(super) fn new(queue: Arc<TapQueue>, max_frame: usize, supported: Supported) -> Self {
        Self { queue, max_frame, supported, counters: Arc::default() }
    }

    #[inline]
    fn send(&self, packet: &Packet) -> Result<(), Errno> {
        let header = &COMPLETE[..self.supported.header_len()];
        self.gather::<{ SEGMENTS + 1 }>(packet, header).unwrap_or_else(|| self.send_long_chain(packet, header))
    }

    /// Sends a superframe, which the kernel segments.
    #[inline(never)]
    fn send_superframe(&self, packet: &mut Packet) -> Result<Result<(), Errno>, DropReason> {
        if let Some(tci) = packet.vlan() {
            sw_offload::insert_vlan_tag(packet, tci, packet.flags().contains(Flags::VLAN_SERVICE))?;
            packet.clear_vlan();
        }
        if superframe::longest_frame(packet) > self.max_frame {
            return Err(DropReason::TooLong);
        }
        let parsed = superframe::parse(packet, None).ok_or(DropReason::KernelOffload)?;
        let mut long = COMPLETE;
        let header = if parsed.inner().is_some() {
            leave_outer_checksum(packet, &parsed).ok_or(DropReason::KernelOffload)?;
            long = VirtioNetHdr::of_tunnel_superframe(packet, &parsed).ok_or(DropReason::KernelOffload)?;
            &long[..]
        } else {
            let short = VirtioNetHdr::of_superframe(packet, &parsed).ok_or(DropReason::KernelOffload)?;
            long[..vnet_hdr::HEADER].copy_from_slice(&short);
            &long[..self.supported.header_len()]
        };
        let sent = self.gather::<{ SUPERFRAME_SEGMENTS + 1 }>(packet, header);
        Ok(sent.unwrap_or_else(|| self.send_long_chain(packet, header)))
    }

    /// Sends a chain of many small segments.
    #[cold]
    #[inline(never)]
    fn send_long_chain(&self, packet: &Packet, header: &[u8]) -> Result<(), Errno> {
        /// `UIO_MAXIOV`.
        const MOST: usize = 1024;
        self.gather::<MOST>(packet, header).unwrap_or(Err(Errno::MSGSIZE))
    }

    /// Writes the packet from at most `N` parts, including the virtio header. `None` if it has more.
    #[inline(always)]
    fn gather<const N: usize>(&self, packet: &Packet, header: &[u8]) -> Option<Result<(), Errno>> {
        let mut parts = [IoSlice::new(&[]); N];
        parts[0] = IoSlice::new(header);
        let mut used = 1;
        for segment in packet.segments() {
            *parts.get_mut(used)? = IoSlice::new(segment);
            used += 1;
        }
        Some(writev(self.queue.as_fd(), &parts[..used]).map(drop))
    }

    fn drop_front(&self, batch: &mut Batch, n: usize, reason: DropReason) {
        self.counters.drops.add(reason, n as u64);
        batch.free_front(n);
    }

    /// Counts and frees the first `n` packets.
    fn sent(&self, batch: &mut Batch, n: usize) {
        self.counters.packets.add(n as u64);
        self.counters.bytes.add(bytes_of(&batch.as_slice()[..n]));
        batch.free_front(n);
    }
}

impl TxDriver for Sender {
    fn transmit(&mut self, batch: &mut Batch) {
        let (mut any, mut sent) = (false, 0);
        while let Some(packet) = batch.as_mut_slice().get_mut(sent) {
            let result = if packet.flags().contains(Flags::TX_SEGMENT) {
                self.send_superframe(packet)
            } else {
                match sw_offload::apply(packet) {
                    Ok(()) if packet.len() > self.max_frame => Ok(Err(Errno::MSGSIZE)),
                    Ok(()) => Ok(self.send(packet)),
                    Err(reason) => Err(reason),
                }
            };
            let result = match result {
                Ok(result) => result,
                Err(reason) => {
                    any |= sent > 0;
                    self.sent(batch, sent);
                    sent = 0;
                    self.drop_front(batch, 1, reason);
                    continue;
                }
            };
            let error = match result {
                Ok(()) => {
                    sent += 1;
                    continue;
                }
                Err(Errno::INTR) => continue,
                Err(error) => error,
            };
            any |= sent > 0;
            self.sent(batch, sent);
            sent = 0;
            let all = batch.len();
            match error {
                Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM => break,
                Errno::MSGSIZE => self.drop_front(batch, 1, DropReason::TooLong),
                // The frame is shorter than an Ethernet header.
                Errno::INVAL => self.drop_front(batch, 1, DropReason::TooShort),
                Errno::IO => self.drop_front(batch, all, DropReason::LinkDown),
                Errno::BADFD => self.drop_front(batch, all, DropReason::DeviceLost),
                _ => self.drop_front(batch, 1, DropReason::TxError),
            }
        }
        any |= sent > 0;
        self.sent(batch, sent);
        if any { self.counters.bursts.add(1) } else { self.counters.empty.add(1) }
    }

    fn segments(&self, packet: &Packet) -> Option<bool> {
        let Some(parsed) = superframe::parse(packet, None) else { return Some(false) };
        Some(match parsed.inner() {
            None => VirtioNetHdr::can_describe(packet, parsed.outer(), self.supported.udp),
            Some(inner) => {
                self.supported.tunnel
                    && parsed.outer().l4_type() == L4Type::Udp
                    && VirtioNetHdr::can_describe(packet, inner, self.supported.udp)
            }
        })
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn set_counters(&mut self, counters: Arc<QueueCounters>) {
        self.counters = counters;
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// Writes the sum of the pseudo header to the outer UDP checksum, if there is one: the kernel expects it there
/// (`skb_udp_tunnel_segment` in net/ipv4/udp_offload.c).
fn leave_outer_checksum(packet: &mut Packet, parsed: &Parsed) -> Option<()> {
    let outer = parsed.outer();
    let len = outer.end().checked_sub(outer.l4())?;
    let pseudo = checksum_offload::pseudo(packet.data(), outer, Transport::Udp.protocol(), len)?;
    let field: &mut [u8; 2] = packet.data_mut().get_mut(outer.l4() + 6..)?.first_chunk_mut()?;
    if *field != [0; 2] {
        *field = pseudo.fold().to_be_bytes();
    }
    Some(())
}
