"""How encoded images become pixels: by Pillow, simplejpeg and OpenCV, in threads or processes; by a GPU."""
