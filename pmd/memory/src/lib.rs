//! Huge-page regions and views of memory shared with devices.
