//! `wirepath attach`: shows a port of a running program, or uses queues of it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use wirepath_packet::PortId;

use clap::Args;
use serde::Serialize;
use wirepath_packet::Batch;
use wirepath_pmd::ipc::{AttachError, AttachRequest, AttachedPort, QueueStatus, Status};

use wirepath::cli::{Failure, Stop, Table, hangup_flag, print, print_json};

/// Packet buffers in addition to those of receive rings.
const BUFFERS: u32 = 512;
/// Maximum time for accepted frames to leave after a stop request.
const DRAIN: Duration = Duration::from_secs(1);

/// Shows a port of a running program, or uses queues of it in this process
///
/// The program offers the port with `attach = SOCKET` in the table of its `mlx5` or `mana` port and
/// `shared = true` in the table `pool`. Without options, the counters of its queues and pool are shown.
/// With --transmit or --receive, queues of the NIC are created for this process. The process maps them,
/// the packets and the doorbells, and works without the program. The queues end with this process,
/// however it ends. A receive queue gets its share of the received packets. With --json: an object with
/// `port`, and `done` if queues were used.
#[derive(Clone, Debug, Args)]
pub struct Options {
    /// Socket on which the program offers its port (`attach` of the port's driver table)
    pub socket: PathBuf,

    /// Attach and send this number of test frames (EtherType 0x88b5, IEEE 802 local experimental) on a
    /// transmit queue of this process (`attach_tx_queues`)
    #[arg(long, value_name = "FRAMES")]
    pub transmit: Option<u64>,

    /// Attach and receive on a queue of this process for this time; the port must offer one
    /// (`attach_rx_queues`)
    #[arg(long, value_name = "SECONDS")]
    pub receive: Option<u64>,

    /// Length of a test frame in bytes, without the FCS
    #[arg(long, value_name = "BYTES", default_value_t = 60, value_parser = clap::value_parser!(u16).range(60..=1514))]
    pub size: u16,
}

/// Output of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    port: Status,
    #[serde(skip_serializing_if = "Option::is_none")]
    done: Option<WorkReport>,
}

/// Results of the attached queues.
#[derive(Debug, Default, Serialize)]
struct WorkReport {
    transmitted: u64,
    received: u64,
    received_bytes: u64,
    /// The device's page of virtio doorbells, or the reason why there is none.
    var: String,
}

/// Shows the port, or attaches and runs the requested work.
///
/// # Errors
/// Fails if no program offers a port on the socket, or if the port does not offer the requested queues.
pub fn run(options: &Options, json: bool) -> Result<(), Failure> {
    hangup_flag();
    let failed = |error: AttachError| Failure::failed(format!("{}: {error}", options.socket.display()));
    let done = match options {
        Options { transmit: None, receive: None, .. } => None,
        _ => Some(work(options, &Stop::on_signals()?).map_err(failed)?),
    };
    let port = AttachedPort::query(&options.socket).map_err(failed)?;
    if json {
        return print_json(&Report { port, done });
    }
    print(describe(&options.socket, &port))?;
    match done {
        None => Ok(()),
        Some(WorkReport { transmitted, received, received_bytes, var }) => print(format_args!(
            "transmitted {transmitted} frames, received {received} ({received_bytes} bytes); virtio doorbells: {var}\n"
        )),
    }
}

fn work(options: &Options, stop: &Stop) -> Result<WorkReport, AttachError> {
    let receives = options.receive.is_some();
    let wanted = AttachRequest {
        tx_queues: u16::from(options.transmit.is_some()),
        rx_queues: u16::from(receives),
        buffers: if receives { AttachedPort::query(&options.socket)?.offered.buffers } else { BUFFERS },
    };
    let mut attached = AttachedPort::attach(&options.socket, &wanted, PortId::new(0))?;
    let var = attached.var.as_ref().map(|var| format!("page {}", var.page_id()));
    let mut done = WorkReport { var: var.unwrap_or_else(Clone::clone), ..WorkReport::default() };
    let begin = Instant::now();
    let receive_time = Duration::from_secs(options.receive.unwrap_or(0));
    let frames = options.transmit.unwrap_or(0);
    let mut rest = Batch::new();
    let mut looked = begin;
    let mut stopped = None;
    loop {
        if stop.requested() && stopped.is_none() {
            stopped = Some(Instant::now());
            rest = Batch::new();
        }
        let works = stopped.is_none() && (done.transmitted < frames || begin.elapsed() < receive_time);
        // Without receive queues, every buffer outside the pool is in flight to the device.
        let tx_in_flight = !receives && attached.pool.outstanding() > 0;
        if !works && (!tx_in_flight || stopped.is_some_and(|since| since.elapsed() > DRAIN)) {
            return Ok(done);
        }
        while works
            && (rest.len() as u64) < 32.min(frames - done.transmitted)
            && let Some(mut frame) = attached.pool.take()
        {
            let Some(bytes) = frame.append(options.size.into()) else { break };
            bytes.fill(0);
            // A broadcast frame from a locally administered address.
            bytes[..6].fill(0xff);
            bytes[6..14].copy_from_slice(&[2, 0, 0, 0, 0, 1, 0x88, 0xb5]);
            if rest.push(frame).is_err() {
                break;
            }
        }
        if let Some(queue) = attached.tx.first_mut() {
            done.transmitted += queue.transmit(&mut rest) as u64;
            queue.reclaim();
        }
        if let Some(queue) = attached.rx.first_mut() {
            let mut batch = Batch::new();
            done.received += queue.receive(&mut batch) as u64;
            done.received_bytes += batch.iter().map(|packet| packet.len() as u64).sum::<u64>();
        }
        if looked.elapsed() > Duration::from_millis(100) {
            looked = Instant::now();
            if let Some(why) = attached.end_reason() {
                return Err(AttachError::Ended(why.to_owned()));
            }
        }
        std::thread::yield_now();
    }
}

fn describe(socket: &Path, port: &Status) -> String {
    let Status { device, driver, mode, mtu, process, pool, attached, attached_ever, lost, .. } = port;
    let mut table = Table::new(["QUEUE", "PACKETS", "BYTES", "DROPS"]);
    let mut rows = |direction: &str, queues: &[QueueStatus]| {
        for (index, QueueStatus { packets, bytes, drops }) in queues.iter().enumerate() {
            table.row([format!("{direction} {index}"), packets.to_string(), bytes.to_string(), drops.to_string()]);
        }
    };
    rows("receive", &port.rx);
    rows("transmit", &port.tx);
    format!(
        "{}: {device}, driver {driver}, MTU {mtu}, of process {process}\n{mode}\n\n{table}\npool '{}': {} of {} \
        buffers free\n\
         attached: {attached} processes now, {attached_ever} so far, {lost} of them without detaching\n",
        socket.display(),
        pool.name,
        pool.free,
        pool.buffers
    )
}
