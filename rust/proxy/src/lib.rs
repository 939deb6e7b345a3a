//! r3router-proxy
