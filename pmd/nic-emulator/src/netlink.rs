//! RDMA netlink: lists the devices, and the character device and driver of each.

use wirepath_nic_defs::netlink as defs;

/// Major number of the emulated character devices, from the range for local use.
pub const MAJOR: u32 = 240;

const HEADER: usize = 16;
const ERROR: u16 = 2;
const DONE: u16 = 3;
const FLAG_MULTI: u16 = 2;
const FLAG_ACK: u16 = 4;
const FLAG_DUMP: u16 = 0x300;
const EINVAL: i32 = 22;
const EOPNOTSUPP: i32 = 95;

/// Properties of a device that netlink reports.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Name of the RDMA device.
    pub name: String,
    /// Number of the uverbs device, also its minor number.
    pub minor: u32,
    /// Number of ports.
    pub ports: u32,
    /// Node GUID in host byte order.
    pub guid: u64,
    /// Driver, `DRIVER_*`.
    pub driver: u32,
    /// ABI version of the driver.
    pub abi: u64,
}

#[derive(Clone, Copy)]
struct Request<'r> {
    kind: u16,
    flags: u16,
    sequence: u32,
    pid: u32,
    attributes: &'r [u8],
}

/// Answers a datagram, which may contain several requests. Returns the reply datagrams.
pub fn answer(devices: &[DeviceInfo], datagram: &[u8]) -> Vec<Vec<u8>> {
    let mut replies = Vec::new();
    let mut rest = datagram;
    while let Some(header) = rest.first_chunk::<HEADER>() {
        let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().expect("four bytes"));
        let half = |at: usize| u16::from_ne_bytes([header[at], header[at + 1]]);
        let length = word(0) as usize;
        let Some(message) = rest.get(..length).filter(|message| message.len() >= HEADER) else { break };
        let request =
            Request { kind: half(4), flags: half(6), sequence: word(8), pid: word(12), attributes: &message[HEADER..] };
        one(devices, request, message, &mut replies);
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    replies
}

fn one(devices: &[DeviceInfo], request: Request<'_>, message: &[u8], replies: &mut Vec<Vec<u8>>) {
    let index =
        attribute(request.attributes, defs::DEV_INDEX).and_then(|value| value.try_into().ok()).map(u32::from_ne_bytes);
    let named = index.and_then(|index| devices.get(index as usize).map(|device| (index, device)));
    let dump = request.flags & FLAG_DUMP != 0;
    let (family, operation) = (request.kind >> 10, request.kind & 0x3ff);
    let error = match (family, operation) {
        (defs::FAMILY, defs::GET) if dump => {
            let mut bytes = Vec::new();
            for (index, device) in devices.iter().enumerate() {
                bytes.extend(put(request, FLAG_MULTI, &describe(index as u32, device)));
            }
            if !bytes.is_empty() {
                replies.push(bytes);
            }
            replies.push(frame(DONE, FLAG_MULTI, request, &0i32.to_ne_bytes()));
            return;
        }
        (defs::FAMILY, defs::GET) => match named {
            Some((index, device)) => {
                replies.push(put(request, 0, &describe(index, device)));
                0
            }
            None => EINVAL,
        },
        (defs::FAMILY, defs::GET_CHARDEV) => match named {
            Some((index, device))
                if attribute(request.attributes, defs::CHARDEV_TYPE)
                    .is_some_and(|kind| kind.starts_with(b"uverbs")) =>
            {
                let mut body = Vec::new();
                attach(&mut body, defs::DEV_INDEX, &index.to_ne_bytes());
                attach(&mut body, defs::CHARDEV_NAME, format!("uverbs{}\0", device.minor).as_bytes());
                attach(&mut body, defs::CHARDEV_ABI, &device.abi.to_ne_bytes());
                attach(&mut body, defs::CHARDEV, &defs::encode_device(MAJOR, device.minor).to_ne_bytes());
                attach(&mut body, defs::UVERBS_DRIVER_ID, &device.driver.to_ne_bytes());
                replies.push(put(request, 0, &body));
                0
            }
            _ => EINVAL,
        },
        (defs::FAMILY, defs::SYS_GET) => {
            let mut body = Vec::new();
            attach(&mut body, defs::NETNS_MODE, &[1]);
            attach(&mut body, defs::COPY_ON_FORK, &[1]);
            replies.push(put(request, 0, &body));
            0
        }
        (defs::FAMILY, defs::PORT_GET) => match named {
            Some((index, device)) => {
                let wanted = attribute(request.attributes, defs::PORT_INDEX)
                    .and_then(|value| value.try_into().ok())
                    .map(u32::from_ne_bytes);
                let mut bytes = Vec::new();
                for port in (1..=device.ports).filter(|port| wanted.is_none_or(|wanted| wanted == *port)) {
                    let mut body = Vec::new();
                    attach(&mut body, defs::DEV_INDEX, &index.to_ne_bytes());
                    attach(&mut body, defs::DEV_NAME, format!("{}\0", device.name).as_bytes());
                    attach(&mut body, defs::PORT_INDEX, &port.to_ne_bytes());
                    attach(&mut body, defs::PORT_STATE, &[4]);
                    attach(&mut body, defs::PORT_PHYS_STATE, &[5]);
                    bytes.extend(put(request, if dump { FLAG_MULTI } else { 0 }, &body));
                }
                if !bytes.is_empty() {
                    replies.push(bytes);
                }
                if dump {
                    replies.push(frame(DONE, FLAG_MULTI, request, &0i32.to_ne_bytes()));
                    return;
                }
                0
            }
            None => EINVAL,
        },
        _ => EOPNOTSUPP,
    };
    if error != 0 || request.flags & FLAG_ACK != 0 {
        let mut body = (-error).to_ne_bytes().to_vec();
        body.extend_from_slice(&message[..HEADER]);
        replies.push(frame(ERROR, 0, request, &body));
    }
}

fn describe(index: u32, device: &DeviceInfo) -> Vec<u8> {
    let mut body = Vec::new();
    attach(&mut body, defs::DEV_INDEX, &index.to_ne_bytes());
    attach(&mut body, defs::DEV_NAME, format!("{}\0", device.name).as_bytes());
    attach(&mut body, defs::PORT_INDEX, &device.ports.to_ne_bytes());
    attach(&mut body, defs::FW_VERSION, b"0.0.0\0");
    attach(&mut body, defs::NODE_GUID, &device.guid.to_ne_bytes());
    attach(&mut body, defs::SYS_IMAGE_GUID, &device.guid.to_ne_bytes());
    attach(&mut body, defs::DEV_NODE_TYPE, &[1]);
    body
}

fn put(request: Request<'_>, flags: u16, body: &[u8]) -> Vec<u8> {
    frame(request.kind, flags, request, body)
}

fn frame(kind: u16, flags: u16, request: Request<'_>, body: &[u8]) -> Vec<u8> {
    let mut bytes = ((HEADER + body.len()) as u32).to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend(request.sequence.to_ne_bytes());
    bytes.extend(request.pid.to_ne_bytes());
    bytes.extend_from_slice(body);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn attach(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    body.extend((4 + value.len() as u16).to_ne_bytes());
    body.extend(kind.to_ne_bytes());
    body.extend_from_slice(value);
    body.resize(body.len().next_multiple_of(4), 0);
}

fn attribute(mut bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    while let Some(header) = bytes.first_chunk::<4>() {
        let length = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        let kind = u16::from_ne_bytes([header[2], header[3]]) & 0x3fff;
        let value = bytes.get(4..length)?;
        if kind == wanted {
            return Some(value);
        }
        bytes = bytes.get(length.next_multiple_of(4)..)?;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
        frame(
            defs::message_type(kind),
            flags | 1,
            Request { kind: 0, flags: 0, sequence: 7, pid: 9, attributes: &[] },
            body,
        )
    }

    fn device() -> DeviceInfo {
        DeviceInfo { name: "mana0".into(), minor: 3, ports: 2, guid: 5, driver: 20, abi: 1 }
    }

    #[test]
    fn a_dump_lists_and_ends() {
        let replies = answer(&[device()], &request(defs::GET, FLAG_DUMP, &[]));
        assert_eq!(replies.len(), 2);
        assert_eq!(attribute(&replies[0][16..], defs::DEV_NAME), Some(&b"mana0\0"[..]));
        assert_eq!(attribute(&replies[0][16..], defs::PORT_INDEX), Some(&2u32.to_ne_bytes()[..]));
        assert_eq!((replies[0][8], replies[0][12], replies[1][4]), (7, 9, 3));
    }

    #[test]
    fn the_character_device_and_its_driver() {
        let mut body = Vec::new();
        attach(&mut body, defs::DEV_INDEX, &0u32.to_ne_bytes());
        attach(&mut body, defs::CHARDEV_TYPE, b"uverbs\0");
        let replies = answer(&[device()], &request(defs::GET_CHARDEV, 0, &body));
        assert_eq!(attribute(&replies[0][16..], defs::UVERBS_DRIVER_ID), Some(&20u32.to_ne_bytes()[..]));
        assert_eq!(attribute(&replies[0][16..], defs::CHARDEV_NAME), Some(&b"uverbs3\0"[..]));
        let replies = answer(&[], &request(defs::GET_CHARDEV, 0, &body));
        assert_eq!(i32::from_ne_bytes(replies[0][16..20].try_into().unwrap()), -EINVAL);
    }

    #[test]
    fn unknown_requests_are_errors() {
        assert_eq!(answer(&[device()], &request(77, FLAG_ACK, &[]))[0][4], 2);
        for length in 0..40 {
            answer(&[device()], &vec![0xa5; length]);
            let mut cut = request(defs::GET, 0, &[4, 0, 1, 0, 0, 0, 0, 0]);
            cut.truncate(length);
            answer(&[device()], &cut);
        }
    }
}
